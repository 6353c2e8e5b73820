"""A rank's end is told in words, with a guess about memory only where the numbers speak for it."""

import json
import signal

import pytest

from nbdist.cluster.death import Death, lost_error, read_death, tell_deaths
from nbdist.messages import RankInfo

GIB = 2**30


def death(signum=0, code=0, peak=1 * GIB, memory=24 * GIB, num_oom_kills=0):
    return Death(
        signal=signum, code=code, peak_bytes=peak, memory_bytes=memory, num_oom_kills=num_oom_kills
    )


def info(rank, pid):
    return RankInfo(
        rank=rank, world_size=2, local_rank=rank, host="h", pid=pid, device="cpu", query_id=""
    )


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (death(code=3), "ended with exit code 3"),
        (
            death(signal.SIGSEGV),
            "ended by SIGSEGV (native code touched memory that is not its own)",
        ),
        (death(signal.SIGABRT), "ended by SIGABRT (native code gave up)"),
        (death(signal.SIGUSR1), "ended by SIGUSR1"),
        (death(40), "ended by signal 40"),
        (death(signal.SIGKILL), "killed by SIGKILL"),
        (death(signal.SIGKILL, peak=9 * GIB), "killed by SIGKILL"),
        # the memory says nothing about a crash
        (death(code=1, num_oom_kills=1), "ended with exit code 1"),
    ],
)
def test_death_is_named_by_signal_or_exit_code(ended, words):
    assert ended.in_words(num_ranks=2) == words


def test_sigkill_with_an_oom_kill_is_probably_out_of_memory():
    words = death(signal.SIGKILL, peak=5 * GIB, num_oom_kills=1).in_words(num_ranks=2)
    assert words.startswith("killed by SIGKILL, probably out of memory (the kernel has ended a")
    assert words.endswith("this one had up to 5.0 of 24.0 GiB)")


def test_sigkill_near_the_memory_of_all_is_perhaps_out_of_memory():
    words = death(signal.SIGKILL, peak=10 * GIB).in_words(num_ranks=2)
    assert words == (
        "killed by SIGKILL, perhaps out of memory (2 ranks share 24.0 GiB, this one had up to 10.0)"
    )


def test_death_without_a_report_is_not_known(tmp_path):
    assert read_death(tmp_path, 5, patience_seconds=0.0) is None


def test_lost_ranks_are_told_each_with_what_to_type(tmp_path):
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for pid, code in ((11, 3), (12, 4)):
        report = {"signal": 0, "code": code, "peak_bytes": 1, "memory_bytes": 2, "num_oom_kills": 0}
        (ranks / f"{pid}.exit").write_text(json.dumps(report))
    infos = [info(0, 11), info(1, 12)]

    assert tell_deaths(tmp_path, infos, [1]) == {1: "ended with exit code 4"}
    error = lost_error(tmp_path, infos, [0, 1], "rank {ranks} died")
    assert error.ranks == (0, 1)
    assert str(error).startswith(
        "rank 0, 1 died: rank 0: ended with exit code 3; rank 1: ended with exit code 4; its "
    )
    assert "`%distributed heal` starts a process in its place" in str(error)
