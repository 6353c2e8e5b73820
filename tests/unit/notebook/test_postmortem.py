"""Which rank the post-mortem debugger looks at."""

import pytest

from nbdist.errors import NbdistError, RankBusyError
from nbdist.messages import RankInfo
from nbdist.notebook.postmortem import choose_rank


class FakeWorld:
    def __init__(self, lost=(), **infos):
        self.lost_ranks = frozenset(lost)
        self._infos = infos

    def status(self):
        place = {"world_size": 9, "local_rank": 0, "host": "h", "pid": 1, "device": "cpu"}
        return [RankInfo(rank=int(name[1:]), **place, **i) for name, i in self._infos.items()]


def failed(at_seconds, name="ValueError"):
    return {"failure": name, "failed_at_seconds": at_seconds}


def test_rank_that_failed_first_is_chosen_when_none_is_named():
    assert choose_rank(FakeWorld(r0=failed(3.0), r1={}, r2=failed(2.0)), None) == 2


def test_named_rank_that_failed_is_chosen():
    assert choose_rank(FakeWorld(r0=failed(3.0), r2=failed(2.0)), 0) == 0


def test_lost_rank_is_left_to_the_world_to_refuse():
    assert choose_rank(FakeWorld(lost=[1], r0=failed(1.0)), 1) == 1


def test_rank_without_failure_is_refused_with_those_that_failed():
    with pytest.raises(
        NbdistError,
        match=r"`%distributed debug -r 0`: rank 0 keeps no failed cell: .*; "
        r"look at rank 1 \(KeyError\) instead",
    ):
        choose_rank(FakeWorld(r0={}, r1=failed(1.0, "KeyError")), 0)


def test_no_failure_at_all_says_to_run_the_cell_again():
    with pytest.raises(NbdistError, match=r"no rank keeps a failed cell: .*; run the failing cell"):
        choose_rank(FakeWorld(r0={}, r1={}), None)


def test_busy_rank_is_refused():
    with pytest.raises(RankBusyError, match="`%distributed debug -r 1`: rank 1 runs a cell; wait"):
        choose_rank(FakeWorld(r0={}, r1={"running_cell": "c"}), 1)
