"""Messages about a cell whose number of ranks changes while it runs (anywhere; stdlib only)."""

from __future__ import annotations

from nbdist.messages.wire import Message, message

__all__ = ["AskResize", "PauseCell", "PauseSite", "RanksChanged", "ResizeAsked"]


@message("pause_cell")
class PauseCell(Message):
    """Client to rank: where is the cell inside `fit()`? Answered by `PauseSite`.

    Attributes:
        commit: stop it there after the running step, as all ranks are asked to.
    """

    cell_id: str
    commit: bool = False


@message("pause_site")
class PauseSite(Message):
    """Rank to client: where the cell can stop and go on later.

    Attributes:
        call: line and column of the call's begin and end; see `CanRecover.call`.
        problem: why it cannot, in words; empty when it can.
    """

    rank: int
    cell_id: str
    call: tuple[int, ...] = ()
    problem: str = ""


@message("ask_resize")
class AskResize(Message):
    """Client to rank: have the client whose cell runs here change the number of ranks."""

    num_ranks: int


@message("resize_asked")
class ResizeAsked(Message):
    """Rank to all clients: another one asks for so many ranks."""

    rank: int
    num_ranks: int


@message("ranks_changed")
class RanksChanged(Message):
    """Inside a client: a cell goes on, from here on, on these ranks."""

    cell_id: str
    ranks: tuple[int, ...]
