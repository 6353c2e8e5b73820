"""What is said after the number of ranks has changed."""

import pytest
from IPython.core.error import UsageError

from nbdist.cluster.places import Places
from nbdist.cluster.resizing import Resized
from nbdist.notebook.arguments import line_parser, parse
from nbdist.notebook.resized import summary


def test_summary_of_new_ranks_names_what_they_lack():
    resized = Resized(
        before=2, after=3, places=Places(moves={}, leaving=[], new=[2]),
        trainers={"trainer": "memory of peers"}, behind={"old": "it is frozen"}, missing=("lock",),
    )  # fmt: skip

    assert summary(resized).splitlines() == [
        "rank 2 is new and has copies of the others' names, but not: lock",
        "`trainer` is on the new mesh, its state from memory of peers: `trainer.fit()` goes on",
        "`old` is still on the old process group and must be built again: it is frozen",
        "other objects that were built over the old process group must be built again",
    ]


def test_summary_of_fewer_ranks_tells_who_is_who():
    resized = Resized(before=4, after=2, places=Places(moves={2: 1}, leaving=[3], new=[]))

    assert summary(resized).splitlines()[:2] == [
        "rank 2 is rank 1 now",
        "rank 3 has ended; its variables are gone with it",
    ]


def test_resize_asks_for_a_number():
    assert parse(line_parser(), "resize -n 4").num_ranks == 4
    with pytest.raises(UsageError, match="required: -n"):
        parse(line_parser(), "resize")
