"""Brings up processes for lost ranks: spares first, else new ones (client)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nbdist import keeper
from nbdist.cluster import starting
from nbdist.cluster.death import read_death
from nbdist.cluster.launch import Processes, Relaunch, log_tail
from nbdist.cluster.link import WorldLink
from nbdist.cluster.rankfile import RankFile, read_rank
from nbdist.cluster.spares import take_places
from nbdist.errors import StartError
from nbdist.messages import RankInfo

__all__ = ["start_processes"]

START_SECONDS = 60.0
POLL_SECONDS = 0.01


def start_processes(
    processes: Processes,
    link: WorldLink,
    infos: Sequence[RankInfo],
    lost: Sequence[int],
    tell: Callable[[str], None],
) -> None:
    """Bring up a process for every lost rank and wait until it is connected and registered.

    Raises:
        StartError: one did not come up.
    """
    directory = processes.directory
    places = {info.rank: info for info in infos}
    absent = {r: places[r].local_rank for r in lost if not _is_replaced(directory, places[r])}
    if absent and (len(absent) < len(infos) or len(infos) == 1):
        # All ranks together come back in one MPI world; a spare is alone in its own.
        tell(f"giving rank {', '.join(map(str, absent))} to a spare, if one is ready")
        taken = take_places(processes.record, link, absent)
        absent = {rank: place for rank, place in absent.items() if rank not in taken}
        lost = [rank for rank in lost if rank not in taken]
    if not lost:
        return
    before = {rank: read_rank(directory, rank) for rank in absent}
    gone = dict.fromkeys(lost, -1) | {rank: file.pid for rank, file in before.items() if file}
    tell(f"starting a process for rank {', '.join(map(str, absent or lost))}")
    launchers = processes.start_again(absent) if absent else []
    deadline = time.monotonic() + START_SECONDS

    def check(waiting: set[int]) -> None:
        _check(directory, launchers, waiting | (link.lost_ranks & set(lost)), deadline)

    try:
        _connect(directory, link, gone, check)
        tell("waiting for its torch and its registration")
        starting.wait_until_registered(link, lost, check)
    except BaseException:
        # Stopped or failed: a second process for a rank must never come up behind the next heal's.
        pids = [entry.child.pid for entry in launchers]
        keeper.end([[pid, keeper.start_ticks(pid)] for pid in pids])
        raise


def _is_replaced(directory: Path, before: RankInfo) -> bool:
    """Return whether another client has started a process for this rank."""
    if before.pid < 0:  # no process yet
        return False
    now = _rank(directory, before.rank)
    # Its supervisor looks at the rank's file before it reports: only then is there a new one.
    read_death(directory, before.pid)
    return now.pid != before.pid and now.is_alive


def _rank(directory: Path, rank: int) -> RankFile:
    file = read_rank(directory, rank)
    assert file is not None, "every rank of a world that runs has written its file"
    return file


def _connect(
    directory: Path, link: WorldLink, gone: dict[int, int], check: Callable[[set[int]], None]
) -> None:
    """Connect to ranks when their files tell of another process; `gone` is `{rank: old pid}`."""
    waiting = set(gone)
    while waiting:
        for rank in sorted(waiting):
            if (file := read_rank(directory, rank)) is not None and file.pid != gone[rank]:
                link.connect(rank, file.endpoint)
                waiting.discard(rank)
        if waiting:
            check(waiting)
            time.sleep(POLL_SECONDS)


def _check(
    directory: Path, launchers: Sequence[Relaunch], waiting: set[int], deadline: float
) -> None:
    """Raise StartError when a new launcher has ended or the time is over."""
    ended = [entry for entry in launchers if entry.child.poll() is not None]
    if not waiting or (not ended and time.monotonic() < deadline):
        return
    name = (ended or launchers)[0].name if launchers else "mpirun"
    raise StartError(
        f"a process for rank {min(waiting)} was started, but "
        + (f"it ended with exit code {ended[0].child.returncode}" if ended else "it did not come")
        + f" within {START_SECONDS:g} s; the other ranks are as they were; the log below says why",
        stage="heal",
        log=log_tail(directory / "logs" / f"{name}.log"),
    )
