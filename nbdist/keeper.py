"""Ends a world when its owner dies (its own small process, on the client's host).

Run as a script by path, without the package and without site-packages: it starts in a few
milliseconds. One JSON line on standard input says what to watch; later lines replace it.
A world started with `keep` outlives its owner; the keeper then only waits for the processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time

GRACE_SECONDS = 1.0


def is_alive(pid: int, started: float) -> bool:
    """Return whether the process that had this pid at this start time still runs."""
    return start_ticks(pid) == started


def start_ticks(pid: int) -> float:
    """Return the start time of a process in clock ticks since boot; 0 when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return 0.0 if fields[0] in "ZX" else float(fields[19])


def end(processes: list[list[float]]) -> None:
    """Terminate these processes with their process groups: SIGTERM, a grace period, SIGKILL."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        alive = [int(pid) for pid, started in processes if is_alive(int(pid), started)]
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signum)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(is_alive(int(p), s) for p, s in processes):
            select.select([], [], [], 0.02)


def watch(owner: int) -> None:
    """Wait until the owner dies or every watched process has ended; then clean up."""
    state: dict[str, object] = {"processes": [], "directory": "", "keep": False}
    poller = select.poll()
    poller.register(0, select.POLLIN)
    try:
        pidfd = os.pidfd_open(owner)
        poller.register(pidfd, select.POLLIN)
    except ProcessLookupError:
        # It is dead already: what it wrote before says what to clean.
        state.update(json.loads(sys.stdin.readlines()[-1]))
        return _clean(state)
    pending = b""
    while True:
        for fd, _ in poller.poll(1000):
            if fd == pidfd:
                poller.unregister(pidfd)
                if not state["keep"]:
                    return _clean(state)
            elif data := os.read(0, 65536):
                *lines, pending = (pending + data).split(b"\n")
                state.update(json.loads(lines[-1]) if lines else {})
            else:
                poller.unregister(0)
        processes: list[list[float]] = state["processes"]  # type: ignore[assignment]
        if processes and not any(is_alive(int(p), s) for p, s in processes):
            return _clean(state)


def _clean(state: dict[str, object]) -> None:
    end(state["processes"])  # type: ignore[arg-type]
    for name in ("directory", "memory_directory"):
        if state.get(name):
            shutil.rmtree(str(state[name]), ignore_errors=True)


if __name__ == "__main__":
    for _signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(_signum, signal.SIG_IGN)
    watch(int(sys.argv[1]))
