"""Ctrl-C that takes effect between steps, on all ranks at the same one (ranks).

A KeyboardInterrupt in the middle of a step would leave some ranks before and others after the
update. So the first SIGINT only asks; the trainer lets the ranks agree and stops them together.
The second one is raised at once: the way out of a step that hangs.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import FrameType, TracebackType

__all__ = ["StopRequest"]


class StopRequest:
    """While entered, the first SIGINT sets `asked`; outside the main thread nothing changes."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: Any = None
        self._installed = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._ask)
            self._installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
