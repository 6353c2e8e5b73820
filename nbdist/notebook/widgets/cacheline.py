"""What the caches of a served model hold while requests run, as one line (client)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from nbdist.errors import ServeError
from nbdist.serve.memory import memory_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.messages import EngineStats

__all__ = ["CacheLine", "HasStats"]


class HasStats(Protocol):
    """What the line needs of a `Router`."""

    def stats(self) -> dict[int, EngineStats]:
        """Return what each engine is doing; may wait for the ranks."""
        ...


class CacheLine:
    """Looks at the engines now and then, on a thread that ends with the last request.

    Args:
        show: takes the line.
        is_live: whether requests run.
        interval_seconds: between two looks.
    """

    def __init__(
        self,
        show: Callable[[str], None],
        is_live: Callable[[], bool],
        *,
        interval_seconds: float = 1.0,
    ) -> None:
        self._show = show
        self._is_live = is_live
        self._interval_seconds = interval_seconds
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()

    def watch(self, router: HasStats) -> None:
        """Show the line from now on, until no request runs; returns at once."""
        with self._lock:
            self._hurry.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(router,), name="nbdist-cache-line", daemon=True
                )
                self._thread.start()

    def _run(self, router: HasStats) -> None:
        while True:
            self._hurry.clear()
            try:
                self._show(memory_line(router.stats()))
            except ServeError:  # nobody serves it any more
                self._show("")
            with self._lock:
                if not self._is_live() and not self._hurry.is_set():
                    self._thread = None
                    return
            self._hurry.wait(self._interval_seconds)
