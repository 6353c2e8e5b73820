"""`run_ranks` itself: results in order, errors, hangs and deaths with no process left."""

import os
import subprocess
import sys
import threading
import time

import pytest

from nbdist.errors import RankLostError
from nbdist.testing import ManualClock, run_ranks


def _sum_of_ranks(rank, scale):
    import torch
    import torch.distributed as dist

    value = torch.tensor([rank * scale])
    dist.all_reduce(value)
    return rank, int(value), torch.get_num_threads()


def _rank_one_raises(rank):
    import torch
    import torch.distributed as dist

    if rank == 1:
        raise KeyError("lost key")
    dist.all_reduce(torch.ones(1))  # waits for rank 1, and is freed by its end


def _rank_one_hangs(rank):
    if rank == 1:
        threading.Event().wait()


def _rank_zero_dies(rank):
    import torch
    import torch.distributed as dist

    if rank == 0:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def _pid(rank):
    return os.getpid()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_run_ranks_returns_results_in_rank_order(world_size):
    results = run_ranks(_sum_of_ranks, world_size, 10)

    total = 10 * sum(range(world_size))
    assert results == [(rank, total, 1) for rank in range(world_size)]


def test_run_ranks_reraises_the_first_error_with_rank_and_traceback():
    started = time.monotonic()

    with pytest.raises(KeyError, match="lost key") as caught:
        run_ranks(_rank_one_raises, 2)

    note = "\n".join(caught.value.__notes__)
    assert "raised on rank 1 of 2" in note
    assert "_rank_one_raises" in note
    assert time.monotonic() - started < 20


def test_run_ranks_names_hanging_ranks_in_a_timeout():
    with pytest.raises(TimeoutError, match=r"`_rank_one_hangs` .* ranks \[1\] of 3") as caught:
        run_ranks(_rank_one_hangs, 3, timeout_seconds=2)

    assert "in _rank_one_hangs" in str(caught.value)


def test_run_ranks_names_a_rank_that_died():
    with pytest.raises(RankLostError, match="rank 0 ended without an answer, exit code 7"):
        run_ranks(_rank_zero_dies, 2)


def test_run_ranks_leaves_no_process():
    pids = run_ranks(_pid, 2)

    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_run_ranks_refuses_a_function_that_cannot_be_imported():
    with pytest.raises(ValueError, match="define it at the top level of a file"):
        run_ranks(lambda rank: rank, 1)


def test_run_ranks_refuses_an_empty_world():
    with pytest.raises(ValueError, match="world_size=0"):
        run_ranks(_pid, 0)


def test_importing_testing_does_not_import_torch():
    code = "import sys, nbdist.testing; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True)


def test_manual_clock_moves_only_forward_and_when_told():
    clock = ManualClock(5.0)
    clock.advance(1.5)

    assert clock() == 6.5
    with pytest.raises(ValueError, match="never goes back"):
        clock.advance(-1)
