"""How much of a cell's text leaves the rank: a bound that keeps client and links small (rank)."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

__all__ = ["TextBudget"]

CHARS_PER_SECOND = 5_000
TAIL_CHARS = 5_000

# A client works on lines: many short ones take it as long as a lot of text.
LINE_COST = 32


class TextBudget:
    """Lets text through up to a limit, which fills up again by 5,000 characters a second.

    A line costs its characters and 32 more.

    Of what is beyond it the last 5,000 characters are kept: they go when the limit allows it,
    with the number of characters before them that are left out.

    Args:
        send: called with stream, text, and the number of characters left out before it.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        send: Callable[[str, str, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._clock = clock
        self._tail: collections.deque[tuple[str, str]] = collections.deque()
        self._num_tail = 0
        self._left_out = 0
        self.reset(TAIL_CHARS)

    @property
    def holds_text(self) -> bool:
        """Whether text waits for the limit."""
        return bool(self._tail)

    def reset(self, limit: int) -> None:
        """Begin a cell that may send `limit` characters at once."""
        self._limit = max(limit, TAIL_CHARS)
        self._left = float(self._limit)
        self._at = self._clock()

    def add(self, stream: str, text: str) -> None:
        """Send text, or keep its end."""
        self._fill()
        cost = len(text) + LINE_COST * text.count("\n")
        if not self._tail and cost <= self._left:
            self._left -= cost
            self._send(stream, text, 0)
            return
        self._keep(stream, text)
        if self._left >= TAIL_CHARS:
            self.release()

    def try_release(self) -> None:
        """Send what is kept if the limit allows it by now."""
        self._fill()
        if self._tail and self._left >= TAIL_CHARS:
            self.release()

    def release(self) -> None:
        """Send what is kept."""
        tail, self._tail = self._tail, collections.deque()
        left_out, self._left_out = self._left_out, 0
        lines = sum(text.count("\n") for _, text in tail)
        self._left = max(self._left - self._num_tail - LINE_COST * lines, 0.0)
        self._num_tail = 0
        for stream, text in tail:
            # The rest of a line whose beginning is missing would look like a line.
            cut = text.find("\n") + 1 if left_out else 0
            self._send(stream, text[cut:], left_out + cut)
            left_out = 0

    def _fill(self) -> None:
        now = self._clock()
        self._left = min(self._limit, self._left + (now - self._at) * CHARS_PER_SECOND)
        self._at = now

    def _keep(self, stream: str, text: str) -> None:
        self._tail.append((stream, text))
        self._num_tail += len(text)
        while (excess := self._num_tail - TAIL_CHARS) > 0:
            stream, text = self._tail.popleft()
            cut = min(excess, len(text))
            self._left_out += cut
            self._num_tail -= cut
            if cut < len(text):
                self._tail.appendleft((stream, text[cut:]))
