"""Many small changes, few messages: a rate limit for what is sent to the page (client)."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Coalescer", "Timer"]


class Timer(Protocol):
    """What `threading.Timer` is of use for here."""

    daemon: bool

    def start(self) -> None:
        """Begin to count."""
        ...


class Coalescer:
    """Calls `flush` at most once an interval, and never leaves a change unsent.

    The first change is sent at once, on the thread that made it; what follows within the
    interval is sent together at its end.

    Args:
        flush: sends all changes; calls of it never overlap.
        interval_seconds: least time between two flushes.
        clock: monotonic seconds.
        timer: makes a `threading.Timer` or what behaves like one.
    """

    def __init__(
        self,
        flush: Callable[[], None],
        *,
        interval_seconds: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[float, Callable[[], None]], Timer] = threading.Timer,
    ) -> None:
        self._flush = flush
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._timer = timer
        self._lock = threading.Lock()
        self._flush_lock = threading.Lock()
        self._next_at = clock()
        self._armed = False

    def mark(self) -> None:
        """Say that something has changed; returns without waiting."""
        with self._lock:
            if self._armed:
                return
            now = self._clock()
            wait = self._next_at - now
            if wait > 0:
                self._armed = True
                timer = self._timer(wait, self._run)
                timer.daemon = True
                timer.start()
                return
            self._next_at = now + self._interval_seconds
        with self._flush_lock:
            self._flush()

    def _run(self) -> None:
        with self._lock:
            self._armed = False
            self._next_at = self._clock() + self._interval_seconds
        with self._flush_lock:
            self._flush()
