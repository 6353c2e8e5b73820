"""Messages of a trial of `World.search` (anywhere; standard library only)."""

from __future__ import annotations

from typing import Any

from nbdist.messages.link import CellEvent
from nbdist.messages.wire import Message, message

__all__ = ["TrialCall", "TrialEnded", "TrialReply"]


@message("trial_call")
class TrialCall(CellEvent):
    """Rank to client: the objective has called a method of its trial and waits for the answer.

    Attributes:
        number: counts a rank's calls.
        method: its name, as Optuna's trial has it.
        arguments: by name.
    """

    number: int
    method: str
    arguments: dict[str, Any]

    def reply(self, value: object = None, error: str = "") -> TrialReply:
        """Return the answer to post to the rank; with an error the call raises ValueError."""
        return TrialReply(cell_id=self.cell_id, number=self.number, value=value, error=error)


@message("trial_reply")
class TrialReply(Message):
    """Client to rank: the answer to the call of this number."""

    cell_id: str
    number: int
    value: Any = None
    error: str = ""


@message("trial_ended")
class TrialEnded(CellEvent):
    """Rank to client: the objective has returned a value, or has pruned itself."""

    value: float = 0.0
    is_pruned: bool = False
