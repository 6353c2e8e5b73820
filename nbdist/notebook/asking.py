"""Puts what ranks ask before the user of a notebook or a terminal (client)."""

from __future__ import annotations

import contextlib
import getpass
import sys
from typing import Any, Protocol

import zmq

from nbdist.cluster.asking import Post, Turns
from nbdist.errors import RankLostError
from nbdist.messages import CellNote, InputRequest, Message, RankDone
from nbdist.notebook.fold import span
from nbdist.notebook.render import CellView

__all__ = ["Prompt", "Prompts", "prompt_of"]


class Prompt(Protocol):
    """Where the user types."""

    def open(self, text: str, *, password: bool) -> None:
        """Show a prompt; the one before it is no longer answered."""
        ...

    def read(self) -> str | None:
        """Return what was typed, None when nothing was yet.

        Raises:
            EOFError: the user has ended the input.
        """
        ...


class KernelPrompt:
    """The input box of a front end, through the kernel's stdin channel.

    `input` would block the kernel, which goes on with the events of the other ranks instead.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._request_id = ""

    def open(self, text: str, *, password: bool) -> None:
        """Send an input request to the front end that runs the cell."""
        kernel = self._kernel
        while self._receive() is not None:
            pass  # answers to a prompt that is gone
        sent = kernel.session.send(
            kernel.stdin_socket,
            "input_request",
            {"prompt": text, "password": password},
            kernel.get_parent("shell"),
            ident=kernel._parent_ident["shell"],
        )
        self._request_id = sent["header"]["msg_id"]

    def read(self) -> str | None:
        """Return what was typed, None when nothing was yet."""
        reply = self._receive()
        if reply is None or reply["parent_header"].get("msg_id") not in (None, self._request_id):
            return None
        text = str(reply["content"]["value"])
        if text == "\x04":
            raise EOFError
        return text

    def _receive(self) -> Any:
        return self._kernel.session.recv(self._kernel.stdin_socket, mode=zmq.NOBLOCK)[1]


class TerminalPrompt:
    """The terminal of a plain IPython, which waits until something was typed."""

    def __init__(self) -> None:
        self._text = ""
        self._password = False

    def open(self, text: str, *, password: bool) -> None:
        """Note what to ask."""
        self._text, self._password = text, password

    def read(self) -> str | None:
        """Ask, and return what was typed."""
        return getpass.getpass(self._text) if self._password else input(self._text)


def prompt_of(shell: Any) -> Prompt | None:
    """Return where the user of a shell types; None when nobody can."""
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        return KernelPrompt(kernel) if kernel._allow_stdin else None
    return TerminalPrompt() if sys.stdin is not None and sys.stdin.isatty() else None


class Prompts:
    """Shows one rank's request at a time, under a note that says who asks.

    Args:
        prompt: where the user types.
        post: sends an answer to a rank.
        view: of the cell.
        is_alone: whether one rank alone runs the cell; there is no note then.
    """

    def __init__(self, prompt: Prompt, post: Post, view: CellView, *, is_alone: bool) -> None:
        self._prompt = prompt
        self._post = post
        self._view = view
        self._turns = Turns()
        self._is_alone = is_alone
        self._asked: set[int] = set()
        self._cell_id = ""
        self._note = ""
        self._stopped = False

    def stop(self) -> None:
        """Ask nothing more: the cell is ending."""
        self._stopped = True

    def take(self, event: Message | None) -> None:
        """Take in an event of the cell, then ask or look for an answer."""
        self._turns.take(event)
        if isinstance(event, RankDone) and event.status != "ok":
            self.stop()
        if self._stopped:
            return
        if (request := self._turns.next()) is not None:
            self._open(request)
        elif self._turns.asked is not None:
            self._look()
        elif self._asked and self._turns.is_idle:
            self._tell(f"Rank {span(tuple(sorted(self._asked)))} was answered.")

    def _open(self, request: InputRequest) -> None:
        self._asked.add(request.rank)
        self._cell_id = request.cell_id
        later = list(dict.fromkeys(self._turns.waiting))
        then = f"; then rank {', '.join(map(str, later))} will ask" if later else ""
        self._tell(
            f"Rank {request.rank} asks{then}. The other ranks go on until they need its part."
        )
        self._view.catch_up(request.rank)
        self._prompt.open(f"[rank {request.rank}] {request.prompt}", password=request.password)

    def _look(self) -> None:
        request = self._turns.asked
        assert request is not None, "something was asked"
        try:
            text = self._prompt.read()
            if text is None:
                return
        except EOFError:
            text = None
        self._turns.answered()
        with contextlib.suppress(RankLostError):  # the cell itself tells of it
            self._post(request.rank, request.reply(text))

    def _tell(self, text: str) -> None:
        if not self._is_alone and text != self._note:
            self._note = text
            self._view.take(CellNote(cell_id=self._cell_id, text=text))
