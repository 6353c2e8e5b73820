"""A thread that ends what is out of time, started when there is a deadline (client; torch-free)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DeadlineWatch"]


class DeadlineWatch:
    """Calls `expire` when the nearest deadline has come.

    Args:
        expire: ends what is out of time; returns the seconds to the nearest deadline that is
            left, or None without one.
        name: of the thread.
    """

    def __init__(self, expire: Callable[[], float | None], name: str) -> None:
        self._expire = expire
        self._name = name
        self._woken = threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Look again: there is a new deadline."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._woken.set()

    def close(self) -> None:
        """Call `expire` no more; a call that runs is not waited for, it may be the caller's."""
        with self._lock:
            self._closed = True
        self._woken.set()

    def _run(self) -> None:
        while not self._closed:
            self._woken.clear()
            self._woken.wait(self._expire())
