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
    is_gone = False
    pidfd = -1
    try:
        pidfd = os.pidfd_open(owner)
        poller.register(pidfd, select.POLLIN)
    except ProcessLookupError:
        is_gone = True
    pending = b""
    while True:
        for fd, _ in poller.poll(1000):
            if fd == pidfd:
                poller.unregister(pidfd)
                is_gone = True
            elif data := os.read(0, 65536):
                *lines, pending = (pending + data).split(b"\n")
                state.update(json.loads(lines[-1]) if lines else {})
            else:
                poller.unregister(0)
        processes = _processes(state)
        # What the owner wrote before it died has been read by now.
        if is_gone and (not state["keep"] or not processes):
            return _clean(state)
        if processes and not any(is_alive(int(p), s) for p, s in processes):
            return _clean(state)


def _processes(state: dict[str, object]) -> list[list[float]]:
    """Return what to end: what the owner has told, and launchers that any client added later."""
    told: list[list[float]] = state["processes"]  # type: ignore[assignment]
    try:
        with open(f"{state['directory']}/world.json", encoding="ascii") as file:  # noqa: PTH123
            added = json.load(file)["processes"]
    except OSError:
        added = []
    return [*told, *(entry for entry in added if entry not in told)]


def _clean(state: dict[str, object]) -> None:
    end(_processes(state))
    for name in ("directory", "memory_directory"):
        if state.get(name):
            shutil.rmtree(str(state[name]), ignore_errors=True)


if __name__ == "__main__":
    for _signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(_signum, signal.SIG_IGN)
    watch(int(sys.argv[1]))
