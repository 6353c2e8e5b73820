"""Starts the process of a rank and stays behind to say how it ended (rank).

`python -m nbdist.rank.supervisor DIRECTORY WORLD_SIZE [RANK LOCAL_RANK | spare TOKEN]` is what the
MPI launcher starts. It forks before anything large is imported. The child becomes the rank: with
RANK and LOCAL_RANK it takes the place of one that has ended, as a spare it waits until a client
gives it one, else MPI tells it its place. The parent only waits, and writes `ranks/PID.exit` when
the child has ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from nbdist.rank.loading import begin_loading
from nbdist.runfiles import write_json

__all__ = ["main"]

PR_SET_PDEATHSIG = 1  # of prctl(2)
ARGUMENTS_OF_FIRST = 3  # of a rank that MPI tells its place


def main() -> None:
    """Fork: the child is the rank, the parent reports its end."""
    directory = Path(sys.argv[1])
    parent = os.getppid()
    _die_with(parent)
    num_oom_kills = _num_oom_kills()
    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
        _die_with(supervisor)
        begin_loading()
        if sys.argv[3:4] == ["spare"]:
            from nbdist.rank.spare import main as be_rank
        else:
            from nbdist.rank.engine import main as be_rank

        be_rank()
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    ending = {
        "signal": max(0, -code),
        "code": max(0, code),
        "peak_bytes": usage.ru_maxrss * 1024,
        "memory_bytes": _memory_bytes(),
        "num_oom_kills": _num_oom_kills() - num_oom_kills,
    }
    # Looked up first: with the report of its end, a client may replace the rank and this file.
    was_rank = _was_rank(directory, pid)
    write_json(directory / "ranks" / f"{pid}.exit", ending)
    _leave(code, was_rank=was_rank)


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent dies; end now if it is dead already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def _leave(code: int, *, was_rank: bool) -> None:
    """End as the child did, so that a launcher of ranks that never came up ends as well.

    A rank that had been at work must not take the others along, and launchers end all of their
    ranks for one: Hydra (MPICH) when its connection closes, Open MPI when an exit code is not 0.
    So this process stays until the launcher ends. A launcher with no other ranks is let go.
    """
    if code and not was_rank:
        os._exit(code if code > 0 else 128 - code)
    if code and len(sys.argv) == ARGUMENTS_OF_FIRST:
        signal.pause()
    os._exit(0)


def _was_rank(directory: Path, pid: int) -> bool:
    """Return whether this process had got as far as to tell its endpoint."""
    files = (directory / "ranks").glob("[0-9]*.json")
    return any(json.loads(file.read_text())["pid"] == pid for file in files)


def _cgroup_files(names: tuple[str, str]) -> list[Path]:
    """Return where the memory cgroup of this process keeps a file, by version 2 and 1 names."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            found += [Path(f"/sys/fs/cgroup{path}") / names[0]]
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            found += [root / path.lstrip("/") / names[1], root / names[1]]
    return [file for file in found if file.exists()]


def _num_oom_kills() -> int:
    """Return how many processes the kernel has ended for lack of memory, here or on the host."""
    files = _cgroup_files(("memory.events", "memory.oom_control"))
    for file in [*files, Path("/proc/vmstat")]:
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _memory_bytes() -> int:
    """Return the memory this process may use: the host's, or less where a cgroup limits it."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in _cgroup_files(("memory.max", "memory.limit_in_bytes")):
        text = file.read_text().strip()
        if text.isdigit():
            total = min(total, int(text))
    return total


if __name__ == "__main__":
    main()
