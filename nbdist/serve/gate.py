"""Serving steps and weight updates take turns on one rank (rank; torch-free)."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["Gate"]

_LOOK_SECONDS = 0.2  # how often a waiting server sees whether an update was left by an exception


class Gate:
    """Admits one of two: a step of an engine, or an update of the weights that it reads.

    Who wants to update comes before the next step, so training waits for one step at most.
    An update that ended by an exception never says so: it is over when its caller's frame is no
    longer running.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._is_serving = False
        self._num_asking = 0
        self._updating: tuple[int, FrameType] | None = None  # thread, and what it runs

    @contextlib.contextmanager
    def serving(self, *, wait: bool = True) -> Iterator[bool]:
        """Hold the weights still for a step.

        Args:
            wait: until no update runs or waits; else yield False when one does.
        """
        mine = self._begin_serving(wait=wait)
        try:
            yield mine
        finally:
            if mine:
                with self._changed:
                    self._is_serving = False
                    self._changed.notify_all()

    def begin_update(self, frame: FrameType) -> float:
        """Wait until no step runs, and let none begin before `end_update`.

        Args:
            frame: of the calling thread; the update is over when it has ended.

        Returns:
            The seconds waited.
        """
        began = self._clock()
        with self._changed:
            self._num_asking += 1
            try:
                self._changed.wait_for(lambda: not self._is_serving)
            finally:
                self._num_asking -= 1
                self._changed.notify_all()
            self._updating = (threading.get_ident(), frame)
        return self._clock() - began

    def end_update(self) -> None:
        """Let steps begin again."""
        with self._changed:
            self._updating = None
            self._changed.notify_all()

    def _begin_serving(self, *, wait: bool) -> bool:
        with self._changed:
            while self._is_serving or self._num_asking or self._is_updating():
                if not wait:
                    return False
                self._changed.wait(_LOOK_SECONDS)
            self._is_serving = True
            return True

    def _is_updating(self) -> bool:
        if self._updating is None:
            return False
        thread, frame = self._updating
        running = sys._current_frames().get(thread)
        while running is not None and running is not frame:
            running = running.f_back
        if running is None:
            self._updating = None
        return running is not None
