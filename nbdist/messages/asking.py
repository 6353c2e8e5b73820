"""Messages by which a rank asks the user something (anywhere; standard library only)."""

from __future__ import annotations

from nbdist.messages.link import CellEvent
from nbdist.messages.wire import Message, message

__all__ = ["InputRequest", "InputReply"]


@message("input_request")
class InputRequest(CellEvent):
    """Rank to client: a call such as `input` waits for a line; `number` counts a rank's calls."""

    number: int
    prompt: str = ""
    password: bool = False

    def reply(self, text: str | None) -> InputReply:
        """Return the answer to post to the rank; None stands for the end of input."""
        return InputReply(cell_id=self.cell_id, number=self.number, text=text)


@message("input_reply")
class InputReply(Message):
    """Client to rank: the answer to the request of this number; no text is the end of input."""

    cell_id: str
    number: int
    text: str | None = None
