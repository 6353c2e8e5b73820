"""What can go wrong in nbdist, one class a kind (anywhere; standard library only).

Every text has three parts: what was asked, what was found, what to do. `ValueError` stays the
answer to a wrong argument; the classes here are conditions met while running.
"""

from __future__ import annotations

import traceback

__all__ = [
    "NbdistError",
    "NoWorldError",
    "StartError",
    "RankLostError",
    "RankBusyError",
    "RemoteCellError",
    "ItemError",
    "TrialError",
    "CellSyntaxError",
    "CellInterrupted",
    "CellTimeoutError",
    "CollectiveMismatchError",
    "CollectiveSubsetError",
    "CheckpointError",
    "NonFiniteError",
    "StateMismatchError",
    "ServeError",
    "Overloaded",
]


class NbdistError(Exception):
    """Base of every error that nbdist raises for a run-time condition.

    In a notebook its text stands alone: frames of nbdist's own would only hide the cause.
    """

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class NoWorldError(NbdistError):
    """No running world where one is needed."""


class StartError(NbdistError):
    """A world could not be started; nothing of it is left running.

    Attributes:
        stage: the stage that failed, in the words that the stage display uses.
        log: the last lines that the processes of that stage wrote.
    """

    def __init__(self, message: str, *, stage: str = "", log: str = "") -> None:
        super().__init__(message)
        self.stage = stage
        self.log = log

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n--- last lines of the log ---\n{self.log}" if self.log else text


class RankLostError(NbdistError):
    """A rank's process has ended, or no longer answers.

    Attributes:
        ranks: the ranks that are lost.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class RankBusyError(NbdistError):
    """A rank is running another cell."""


class CellTimeoutError(NbdistError):
    """A cell ran longer than its `timeout_seconds`; its ranks were stopped."""


class CollectiveMismatchError(NbdistError):
    """Ranks of a group made calls that do not belong together; it was found before sending."""


class StaleGroupError(NbdistError):
    """A collective was called on a process group that was freed after a failure or a stop."""


class CollectiveSubsetError(NbdistError):
    """A rank waited in a collective that idle ranks of its group never called.

    Attributes:
        ranks: the idle ranks.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class RemoteCellError(NbdistError):
    """A cell failed on one or more ranks. The first cause stands on top.

    Attributes:
        rank: the rank that failed first.
        name: the class name of its exception, such as `ValueError`.
        value: the text of its exception.
        traceback: its formatted traceback, with colour codes.
        others: `{rank: what happened to it}` of the ranks that ended after it.
        hint: what to do about it, where nbdist knows; else empty.
    """

    def __init__(
        self,
        rank: int,
        name: str,
        value: str,
        remote_traceback: str = "",
        others: dict[int, str] | None = None,
        *,
        hint: str = "",
    ) -> None:
        super().__init__(rank, name, value, remote_traceback, others)
        self.rank = rank
        self.name = name
        self.value = value
        self.traceback = remote_traceback
        self.others = dict(others or {})
        self.hint = hint

    def __str__(self) -> str:
        text = f"rank {self.rank} raised {self.name}: {self.value}"
        if self.others:
            shown = [f"rank {rank} {what}" for rank, what in sorted(self.others.items())[:8]]
            rest = len(self.others) - len(shown)
            text += "; then " + "; ".join(shown) + (f"; and {rest} more" if rest > 0 else "")
        return f"{text}\nHint: {self.hint}." if self.hint else text

    def _render_traceback_(self) -> list[str]:
        """Show the rank's own traceback in IPython, not the client's."""
        lines = self.traceback.splitlines() if self.traceback else []
        return [*lines, f"{type(self).__name__}: {self}"]


class ItemError(RemoteCellError):
    """An item of `World.map` failed; no further items were begun.

    Attributes:
        index: which item, counted from 0.
        done: results of the items that were done, by index.
    """

    def __init__(
        self,
        index: int,
        rank: int,
        name: str,
        value: str,
        remote_traceback: str = "",
        *,
        done: dict[int, object] | None = None,
    ) -> None:
        super().__init__(rank, name, value, remote_traceback)
        self.index = index
        self.done = dict(done or {})

    def __str__(self) -> str:
        return f"item {self.index} failed: {super().__str__()}"


class TrialError(RemoteCellError):
    """The objective of `World.search` failed; no further trials were begun.

    Attributes:
        number: of the trial.
        params: what it was to try.
    """

    def __init__(self, number: int, params: dict[str, object], cause: RemoteCellError) -> None:
        super().__init__(
            cause.rank, cause.name, cause.value, cause.traceback, cause.others, hint=cause.hint
        )
        self.number = number
        self.params = dict(params)

    def __str__(self) -> str:
        tried = ", ".join(f"{name}={value!r}" for name, value in self.params.items())
        return f"trial {self.number} ({tried}) failed: {super().__str__()}"


class CheckpointError(NbdistError):
    """A checkpoint cannot be saved, found, verified or loaded."""


class NonFiniteError(NbdistError):
    """A layer returned NaN or infinity; the text names it and its rank."""


class StateMismatchError(NbdistError):
    """State that should be equal on several ranks is not; the text names ranks and tensors."""


class CellSyntaxError(NbdistError):
    """A cell is not valid Python; no rank was touched.

    Args:
        error: what the compiler said.
    """

    def __init__(self, error: SyntaxError) -> None:
        super().__init__("".join(traceback.format_exception_only(error)).rstrip())

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class CellInterrupted(KeyboardInterrupt):
    """A cell was stopped by its user; the ranks keep their variables."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


# Front ends know a stopped cell by this name.
CellInterrupted.__name__ = KeyboardInterrupt.__name__


class ServeError(NbdistError):
    """A request cannot be served, or no model is being served."""


class Overloaded(ServeError):  # noqa: N818 - the name of the field
    """A replica's queue is full.

    Attributes:
        depth: requests waiting.
        limit: the most that may wait.
    """

    def __init__(self, message: str, *, depth: int, limit: int) -> None:
        super().__init__(message)
        self.depth = depth
        self.limit = limit
