"""Runs cells on a rank in a real IPython shell, one at a time (rank).

A cell arrives on the control thread and runs on the main thread's event loop. Stopping it is
one signal to the main thread: its handler raises KeyboardInterrupt when the cell's own code is
on the stack, and cancels the cell's task when the cell waits in an `await`.
"""

from __future__ import annotations

import asyncio
import bdb
import ctypes
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from nbdist.messages import (
    Interrupt,
    Message,
    RankDone,
    RankError,
    RankFailed,
    RunCell,
    StopDeferred,
)
from nbdist.rank import loaders
from nbdist.rank.asking import Asking
from nbdist.rank.failure import LastFailure
from nbdist.rank.link import RankLink
from nbdist.rank.output import CellOutput, FdCapture
from nbdist.rank.survive import rejoining

__all__ = ["Executor"]

_RUN_CODE = InteractiveShell.run_code.__code__
_MAKE_LOADER = "_MultiProcessingDataLoaderIter.__init__"
_libc = ctypes.CDLL(None)

_STOPS = KeyboardInterrupt | asyncio.CancelledError | bdb.BdbQuit
_LEFT = "the debugger was left by `q`, which ends the cell; `c` goes on with it"

RETRY_SECONDS = 0.05
IMPORT_SECONDS = 5.0


class Executor:
    """The rank's only way to run a user's cell.

    Args:
        shell: the engine's shell.
        link: where requests come from.
        output: where everything that the cell writes goes.
        captures: of the descriptors 1 and 2.
    """

    def __init__(
        self,
        shell: InteractiveShell,
        link: RankLink,
        output: CellOutput,
        captures: list[FdCapture],
    ) -> None:
        self._shell = shell
        self._link = link
        self.output = output
        self._captures = captures
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._current = ""
        self._task: asyncio.Task[None] | None = None
        self._interrupted = False
        self._put_off_until = 0.0
        self._failed_at = 0.0
        self.advise: Callable[[str], str] = lambda _text: ""
        self.on_rejoin: Callable[[RunCell], None] = lambda _request: None
        self.asking = Asking(link, output, self._drain)
        self.failure = LastFailure(shell)
        # IPython's hook point for front ends.
        shell._showtraceback = self._show_traceback  # type: ignore[method-assign,assignment]
        self._show_in_full = shell.showtraceback
        shell.showtraceback = self._show_or_list  # type: ignore[method-assign]
        signal.signal(signal.SIGINT, self._on_sigint)
        link.on_message(RunCell, self._accept)
        link.on_message(Interrupt, self._interrupt)

    @property
    def running_cell(self) -> str:
        """The id of the cell that runs; empty when idle."""
        return self._current

    @property
    def cell_numbers(self) -> dict[str, int]:
        """The number of the cell that each file name of a cell's code stands for."""
        numbers: dict[str, int] = self._shell.compile._filename_map
        return numbers

    def _accept(self, message: Message) -> None:
        """Take a cell, or say which one runs (control thread)."""
        assert isinstance(message, RunCell), message
        with self._lock:
            busy, self._current = self._current, self._current or message.cell_id
            # A stop may arrive before the main thread has begun.
            self._interrupted = self._interrupted and bool(busy)
        if busy:
            self._link.emit(
                RankDone(
                    rank=self._link.rank,
                    cell_id=message.cell_id,
                    seq=0,
                    status="busy",
                    seconds=0.0,
                    detail=busy,
                )
            )
        else:
            if message.rejoin:
                self.on_rejoin(message)
            self._loop.call_soon_threadsafe(self._start, message)

    def _start(self, message: RunCell) -> None:
        self._task = self._loop.create_task(self._run(message))

    async def _run(self, message: RunCell) -> None:
        """Run one cell from its first event to `RankDone`."""
        started = time.perf_counter()
        self._failed_at = 0.0
        self.failure.begin(message.source)
        self.output.begin(message.cell_id, message.text_limit)
        self.asking.begin(message)
        status = "ok"
        try:
            status = "interrupted" if self._interrupted else await self._execute(message)
        except (KeyboardInterrupt, asyncio.CancelledError):
            status = "interrupted"
            loaders.end_workers()
        finally:
            self.asking.end()
            self._drain()
            with self._lock:
                self._current = ""
            seconds = time.perf_counter() - started
            self.output.event(RankDone, status=status, seconds=seconds)

    async def _execute(self, message: RunCell) -> str:
        shell = self._shell
        if message.execution_count:
            shell.execution_count = message.execution_count
        problem: Any = None
        try:
            transformed = shell.transform_cell(message.source)
        except Exception:  # noqa: BLE001 - any input transformer of the user; shown as the cell's error
            transformed, problem = message.source, sys.exc_info()
        result = None
        try:
            with rejoining(shell, message):
                result = await shell.run_cell_async(
                    message.source,
                    store_history=True,
                    transformed_cell=transformed,
                    preprocessing_exc_tuple=problem,
                )
        finally:
            shell.events.trigger("post_execute")
            shell.events.trigger("post_run_cell", result)
            if shell.payload_manager is not None:
                shell.payload_manager.clear_payload()
        error = result.error_before_exec or result.error_in_exec
        if error is None:
            return "ok"
        stopped = self._interrupted and isinstance(error, _STOPS)
        if stopped:
            # Before the frames: a loader that goes with its frame would wait for them.
            loaders.end_workers()
        self.failure.end(error, stopped=stopped)
        if stopped:
            return "interrupted"
        if isinstance(error, bdb.BdbQuit):
            # IPython says nothing of it: at a prompt in a terminal there is nobody to tell.
            self._show_traceback(bdb.BdbQuit, _LEFT, [f"BdbQuit: {_LEFT}"])
        return "error"

    def _show_or_list(self, *args: Any, **kwargs: Any) -> None:
        """Show the exception of a cell as IPython does, after a stop only list its calls.

        Nobody reads the traceback of a stop, and IPython takes up to a second to set one.
        """
        etype, value, trace = sys.exc_info()
        if etype is None or not (self._current and self._interrupted):
            # Only for the cell itself: one that it runs by `run_cell` may fail and the cell go on.
            if kwargs.get("running_compiled_code") and _depth(sys._getframe(1)) == 1:
                self._failed_at = time.time()
                self.output.event(RankFailed)
            self._show_in_full(*args, **kwargs)
            return
        lines = traceback.format_exception(etype, value, trace)
        self._show_traceback(etype, value, ["".join(lines).rstrip()])

    def _show_traceback(self, etype: type[BaseException], value: Any, lines: list[str]) -> None:
        try:
            text = str(value)
        except Exception as error:  # noqa: BLE001 - a user's exception may fail to print itself
            text = f"<str() of it failed: {type(error).__name__}>"
        self._drain()
        self.output.event(
            RankError,
            name=etype.__name__,
            value=text,
            traceback="\n".join(lines),
            at_seconds=self._failed_at or time.time(),
            hint=self.advise(text),
        )

    def _drain(self) -> None:
        _libc.fflush(None)
        for capture in self._captures:
            capture.drain()

    def _interrupt(self, message: Message) -> None:
        assert isinstance(message, Interrupt), message
        self.interrupt(message.cell_id)

    def interrupt(self, cell_id: str) -> None:
        """Stop the cell if it is the one that runs (control thread)."""
        with self._lock:
            if self._current != cell_id:
                return
            self._interrupted = True
        self.asking.stop()
        self._put_off_until = time.monotonic() + IMPORT_SECONDS
        if self.defers_stops:
            self._link.emit(StopDeferred(rank=self._link.rank, cell_id=cell_id))
        _signal_main_thread()

    @property
    def defers_stops(self) -> bool:
        """Whether code has put its own handler in place, as a trainer: it chooses when to stop."""
        return signal.getsignal(signal.SIGINT) not in (self._on_sigint, signal.default_int_handler)

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        del signum
        if not self._current or not self._interrupted:
            return
        if _is_half_done(frame) and time.monotonic() < self._put_off_until:
            # A module that is half imported stays broken for the rest of the process, and of a
            # loader that is half made some workers are known to nobody.
            threading.Timer(RETRY_SECONDS, _signal_main_thread).start()
            return
        while frame is not None:
            if frame.f_code is _RUN_CODE:
                raise KeyboardInterrupt
            frame = frame.f_back
        if self._task is not None and asyncio.current_task(self._loop) is self._task:
            # The cell's code has not begun, or has just ended.
            threading.Timer(RETRY_SECONDS, _signal_main_thread).start()
        elif self._task is not None:
            # The loop may be asleep: only this form wakes it.
            self._loop.call_soon_threadsafe(self._task.cancel)


def _signal_main_thread() -> None:
    main = threading.main_thread().ident
    assert main is not None, "the main thread has started"
    signal.pthread_kill(main, signal.SIGINT)


def _depth(frame: FrameType | None) -> int:
    """Return how many cells are being run, one inside the other."""
    depth = 0
    while frame is not None:
        depth += frame.f_code is _RUN_CODE
        frame = frame.f_back
    return depth


def _is_half_done(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _RUN_CODE:
        code = frame.f_code
        if code.co_filename == "<frozen importlib._bootstrap>" or code.co_qualname == _MAKE_LOADER:
            return True
        frame = frame.f_back
    return False
