"""`input`, `getpass` and `sys.stdin` of a rank: they ask the client that runs the cell (rank)."""

from __future__ import annotations

import builtins
import contextlib
import getpass
import io
import itertools
import os
import queue
import sys
from collections.abc import Callable
from typing import Any

from IPython.core.error import StdinNotImplementedError

from nbdist.messages import InputReply, InputRequest, Message, RunCell
from nbdist.rank.link import RankLink
from nbdist.rank.output import CellOutput

__all__ = ["Asking"]

WAKE_SECONDS = 0.2


class Asking:
    """Blocks the calling thread until the client has sent a line.

    Args:
        link: where answers come from.
        output: where requests go, after the text before them.
        drain: hands over what C code has written.
    """

    def __init__(self, link: RankLink, output: CellOutput, drain: Callable[[], None]) -> None:
        self._link = link
        self._output = output
        self._drain = drain
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[str | None]] = {}
        self._cell_id = ""
        self._can_ask = False
        self._stopped = False
        self._pid = os.getpid()
        link.on_message(InputReply, self._take)

    @property
    def waits(self) -> bool:
        """Whether a thread of the cell waits for an answer."""
        return bool(self._waiting)

    def install(self) -> None:
        """Become `input`, `getpass.getpass` and `sys.stdin` of this process."""
        builtins.input = self.input
        getpass.getpass = self.getpass
        sys.stdin = _Stdin(self)

    def begin(self, cell: RunCell) -> None:
        """Ask for this cell from now on."""
        self._cell_id, self._can_ask, self._stopped = cell.cell_id, cell.can_ask, False

    def stop(self) -> None:
        """Ask no more in this cell: it is being stopped."""
        self._stopped = True

    def end(self) -> None:
        """Note that the cell has ended; threads that it has left behind find the end of input."""
        self._cell_id = ""
        for answers in list(self._waiting.values()):
            answers.put(None)

    def input(self, prompt: object = "", /) -> str:
        """Return a line that the user typed; see `builtins.input`."""
        __tracebackhide__ = True
        return self.ask(f"input({prompt!r})" if prompt else "input()", str(prompt))

    def getpass(self, prompt: str = "Password: ", stream: Any = None, **_ignored: Any) -> str:
        """Return a line that was typed unseen; see `getpass.getpass`."""
        __tracebackhide__ = True
        del stream
        return self.ask("getpass()", prompt, password=True)

    def ask(self, what: str, prompt: str, *, password: bool = False) -> str:
        """Ask the client and wait, in any thread of the cell.

        Raises:
            StdinNotImplementedError: nobody can type.
            EOFError: the user has ended the input, or the cell is being stopped. A debugger
                that goes on after a KeyboardInterrupt leaves at this.
        """
        __tracebackhide__ = True
        self.check(what)
        if self._stopped:
            raise EOFError(f"{what} on rank {self._link.rank}: the cell is being stopped")
        self._drain()
        number = next(self._numbers)
        answers = self._waiting[number] = queue.SimpleQueue()
        try:
            self._output.event(InputRequest, number=number, prompt=prompt, password=password)
            text = _wait(answers)
        finally:
            del self._waiting[number]
        if text is None:
            raise EOFError(f"{what} on rank {self._link.rank}: the input has ended")
        return text

    def check(self, what: str) -> None:
        """Raise StdinNotImplementedError when nobody can type; `what` wants to ask."""
        __tracebackhide__ = True
        if os.getpid() != self._pid:
            reason = "in a child process of the rank"
        elif not self._cell_id:
            reason = "outside of a cell"
        elif not self._can_ask:
            reason = "in a cell whose client takes no input"
        else:
            return
        raise StdinNotImplementedError(
            f"{what} was called on rank {self._link.rank}, {reason}: nobody can type an answer; "
            "set the value as a variable before (`%distributed push`), or in a script pass "
            "`on_input=` to `World.run`"
        )

    def _take(self, message: Message) -> None:
        """Wake the call that was answered (control thread)."""
        assert isinstance(message, InputReply), message
        answers = self._waiting.get(message.number)
        if answers is not None and message.cell_id == self._cell_id:
            answers.put(message.text)


def _wait(answers: queue.SimpleQueue[str | None]) -> str | None:
    """Wait for an answer.

    With a limit, again and again: a signal that comes right before a wait without one would not
    end it, and its handler, which stops the cell, would never run.
    """
    while True:
        with contextlib.suppress(queue.Empty):
            return answers.get(timeout=WAKE_SECONDS)


class _Stdin(io.TextIOBase):
    """`sys.stdin` of a rank; each line is asked for."""

    encoding = "utf-8"
    errors = "strict"
    name = "<stdin>"

    def __init__(self, asking: Asking) -> None:
        super().__init__()
        self._asking = asking

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        """Return a line with its end; an empty text at the end of input."""
        del size
        try:
            return self._asking.ask("sys.stdin.readline()", "") + "\n"
        except EOFError:
            return ""

    def read(self, size: int | None = -1, /) -> str:
        """Return all lines until the end of input."""
        del size
        return "".join(iter(self.readline, ""))

    def fileno(self) -> int:
        """Return the descriptor that child processes inherit."""
        return 0

    def readable(self) -> bool:
        """Return True."""
        return True
