"""What ranks ask their user: one rank at a time, in order of arrival (client)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator

from nbdist.errors import RankLostError
from nbdist.messages import InputRequest, Message, RankDone

__all__ = ["Turns", "OnInput", "Post", "answering"]

OnInput = Callable[[int, str, bool], str]
Post = Callable[[int, Message], None]

FOLLOW_SECONDS = 0.3


class Turns:
    """Whose request is put to the user now.

    Requests are taken in order of arrival. The rank that was answered last comes first when it
    asks again within `FOLLOW_SECONDS`, so a debugger's session is not mixed with another's.

    Args:
        clock: seconds, monotonic.

    Attributes:
        asked: the request that is before the user.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.asked: InputRequest | None = None
        self._queue: list[InputRequest] = []
        self._clock = clock
        self._last = -1
        self._until = 0.0

    @property
    def waiting(self) -> list[int]:
        """Ranks whose requests come later, in order."""
        return [request.rank for request in self._queue]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is asked and nobody's next request is expected."""
        return self.asked is None and not self._queue and self._clock() >= self._until

    def take(self, event: Message | None) -> None:
        """Take in an event of the cell; a rank that has ended asks nothing any more."""
        if isinstance(event, InputRequest):
            self._queue.append(event)
        elif isinstance(event, RankDone):
            self._queue = [request for request in self._queue if request.rank != event.rank]
            if self.asked is not None and self.asked.rank == event.rank:
                self.asked = None
            if self._last == event.rank:
                self._until = 0.0

    def next(self) -> InputRequest | None:
        """Return the request to put to the user now, if there is a new one."""
        if self.asked is not None:
            return None
        following = self._clock() < self._until
        for request in self._queue:
            if request.rank == self._last or not following:
                self._queue.remove(request)
                self.asked = request
                return request
        return None

    def answered(self) -> None:
        """Note that the user has answered what was asked."""
        assert self.asked is not None, "something was asked"
        self._last, self._until = self.asked.rank, self._clock() + FOLLOW_SECONDS
        self.asked = None


def answering(
    stream: Generator[Message | None, None, None], on_input: OnInput | None, post: Post
) -> Iterator[Message]:
    """Yield a cell's events and answer its requests, each when its turn comes.

    Args:
        stream: of the cell; it is closed, which stops the cell, when anything is raised.
        on_input: called with rank, prompt and whether what is typed is secret; returns the
            line. EOFError is passed to the rank. None when the cell asks nothing.
        post: sends a message to a rank.
    """
    turns = Turns()
    with contextlib.closing(stream):
        for event in stream:
            if event is not None:
                yield event
            turns.take(event)
            if on_input is not None and (request := turns.next()) is not None:
                reply = request.reply(_line(on_input, request))
                turns.answered()
                with contextlib.suppress(RankLostError):  # the cell itself tells of it
                    post(request.rank, reply)


def _line(on_input: OnInput, request: InputRequest) -> str | None:
    try:
        text = on_input(request.rank, request.prompt, request.password)
    except EOFError:
        return None
    if not isinstance(text, str):
        raise TypeError(
            f"on_input(rank={request.rank}, ...) returned {type(text).__name__}: "
            "return the line as str, or raise EOFError to end the rank's input"
        )
    return text
