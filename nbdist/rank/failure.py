"""The last failure of a rank: kept for the debugger, dropped when the next cell begins (rank)."""

from __future__ import annotations

import contextlib
import gc
import inspect
import re
import sys
import time
from types import FrameType

from IPython.core.interactiveshell import InteractiveShell

__all__ = ["LastFailure"]

_LOOKS_BACK = re.compile(r"%(debug|tb)\b|\b(pm|post_mortem)\(|\blast_(exc|value|traceback)\b")


_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class LastFailure:
    """Holds a failed cell's traceback, and with it every local variable of its frames.

    Args:
        shell: the rank's shell, which keeps references of its own.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.text = ""
        self.at_seconds = 0.0

    def end(self, error: BaseException, *, stopped: bool) -> None:
        """Keep what has ended a cell, unless the user did: then nothing is left of it."""
        if stopped or getattr(sys, "last_value", None) is not error:
            self._forget(error)
        else:
            self.text = type(error).__name__
            self.at_seconds = time.time()

    def begin(self, source: str) -> None:
        """Drop the failure, unless the cell that begins looks back at it."""
        if self.text and not _LOOKS_BACK.search(source):
            self._forget(None)

    def _forget(self, error: BaseException | None) -> None:
        self.text = ""
        shell = self._shell
        result = shell.last_execution_result
        errors = [error, *(vars(sys).pop(name, None) for name in ("last_exc", "last_value"))]
        if result is not None:
            errors += [result.error_in_exec, result.error_before_exec]
        for name in ("last_type", "last_traceback"):
            vars(sys).pop(name, None)
        _drop_tracebacks(errors)
        vars(shell.InteractiveTB).pop("tb", None)
        # A debugger remembers the frames that it has shown.
        shell.InteractiveTB.pdb = None
        shell.last_execution_result = None
        shell.displayhook.exec_result = None


def _drop_tracebacks(errors: list[BaseException | None]) -> None:
    """Let go of the frames of exceptions, of those that led to them and of those in a group."""
    suspends = False
    while errors:
        error = errors.pop()
        if error is None or (traceback := error.__traceback__) is None:
            continue
        error.__traceback__ = None
        errors += [error.__cause__, error.__context__]
        if isinstance(error, BaseExceptionGroup):
            errors += error.exceptions
        while traceback is not None:
            suspends |= not _clear(traceback.tb_frame)
            traceback = traceback.tb_next
    if suspends:
        gc.collect()


def _clear(frame: FrameType) -> bool:
    """Drop the variables of a frame; return False when it may still be in use, as generators."""
    if frame.f_code.co_flags & _SUSPENDS:
        return frame.f_code is InteractiveShell.run_code.__code__
    with contextlib.suppress(RuntimeError):  # it still runs
        frame.clear()
        # Before Python 3.13 whoever looked at the variables has left a copy in the frame, and
        # frames live on in cycles of the traceback's formatter: reading empties the copy.
        _ = frame.f_locals
    return True
