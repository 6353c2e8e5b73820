"""How a rank's process ended, as its supervisor has reported it (client)."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nbdist.errors import RankLostError
from nbdist.messages import RankInfo

__all__ = ["Death", "read_death", "tell_deaths", "lost_error"]

# The supervisor writes within milliseconds, but the kernel first takes the memory back.
PATIENCE_SECONDS = 1.0
POLL_SECONDS = 0.01
MEANINGS: dict[int, str] = {
    signal.SIGSEGV: "native code touched memory that is not its own",
    signal.SIGBUS: "native code touched memory that is not there; /dev/shm may be full",
    signal.SIGABRT: "native code gave up",
    signal.SIGILL: "native code was built for another CPU",
    signal.SIGFPE: "native code divided by zero",
    signal.SIGTERM: "something asked it to end",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The end of a rank's process.

    Attributes:
        signal: number of the signal that ended it; 0 when it exited.
        code: its exit code when it exited.
        peak_bytes: the most memory it had resident.
        memory_bytes: what it could have: the host's memory, or its cgroup's limit.
        num_oom_kills: how many processes the kernel ended for lack of memory while it lived.
    """

    signal: int
    code: int
    peak_bytes: int
    memory_bytes: int
    num_oom_kills: int

    def in_words(self, num_ranks: int) -> str:
        """Return how it ended and, where the memory speaks for it, a guess why.

        Args:
            num_ranks: ranks that share the memory.
        """
        if not self.signal:
            return f"ended with exit code {self.code}"
        name = next((s.name for s in signal.Signals if s == self.signal), f"signal {self.signal}")
        if self.signal == signal.SIGKILL:
            return f"killed by {name}" + self._memory_guess(num_ranks)
        meaning = MEANINGS.get(self.signal)
        return f"ended by {name}" + (f" ({meaning})" if meaning else "")

    def _memory_guess(self, num_ranks: int) -> str:
        peak, memory = f"{self.peak_bytes / 2**30:.1f}", f"{self.memory_bytes / 2**30:.1f}"
        if self.num_oom_kills > 0:
            return (
                ", probably out of memory (the kernel has ended a process for lack of memory; "
                f"this one had up to {peak} of {memory} GiB)"
            )
        if self.peak_bytes * num_ranks > 0.8 * self.memory_bytes:
            return (
                f", perhaps out of memory ({num_ranks} ranks share {memory} GiB, this one had up "
                f"to {peak})"
            )
        return ""


def read_death(
    directory: Path, pid: int, patience_seconds: float = PATIENCE_SECONDS
) -> Death | None:
    """Return how a rank's process has ended; None when that is not known in time.

    Nobody is left to report when supervisor and rank end together, as with their launcher.
    """
    path = directory / "ranks" / f"{pid}.exit"
    deadline = time.monotonic() + patience_seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_SECONDS)
    return Death(**json.loads(path.read_text()))


def tell_deaths(directory: Path, infos: Sequence[RankInfo], ranks: Sequence[int]) -> dict[int, str]:
    """Return in words how ranks have ended, by rank."""
    pids = {info.rank: info.pid for info in infos}
    told = {}
    for rank in ranks:
        death = read_death(directory, pids.get(rank, 0))
        told[rank] = death.in_words(len(infos)) if death else "how it ended is not known"
    return told


def lost_error(
    directory: Path, infos: Sequence[RankInfo], ranks: Sequence[int], text: str
) -> RankLostError:
    """Return the error of an action that needs ranks which are gone.

    The text says what happened or was asked, with `{ranks}` for the ranks.
    """
    deaths = tell_deaths(directory, infos, ranks)
    numbers = ", ".join(map(str, ranks))
    how = "; ".join(f"rank {rank}: {words}" for rank, words in deaths.items())
    return RankLostError(
        f"{text.format(ranks=numbers)}: {how if len(ranks) > 1 else deaths[ranks[0]]}; its "
        f"variables are gone with it;{_log_hint(deaths)} `%distributed heal` starts a process in "
        "its place, the other ranks keep theirs",
        ranks=tuple(ranks),
    )


def _log_hint(deaths: dict[int, str]) -> str:
    """Point to the stacks that Python's fault handler writes when native code crashes."""
    ranks = [str(rank) for rank, words in deaths.items() if "(native code" in words]
    if not ranks:
        return ""
    return f" `%distributed logs -r {','.join(ranks)}` ends with the line it was at;"
