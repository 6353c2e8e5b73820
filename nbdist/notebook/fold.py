"""Many ranks' output as one text: equal lines once, with the span of their ranks (client)."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Piece", "Folder", "span"]

HOLD_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Piece:
    """One line of a rank, or one display.

    Attributes:
        stream: `stdout`, `stderr` or `display`.
        text: the line without its end; for a display its content as canonical JSON.
        content: a display's content; pieces are equal when stream and text are.
    """

    stream: str
    text: str

    # A display is compared by its text and shown by its content.
    content: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Piece) and self.stream == other.stream and self.text == other.text

    def __hash__(self) -> int:
        return hash((self.stream, self.text))


def span(ranks: Iterable[int]) -> str:
    """Return ranks as text: `0-3`, `0,2`, `1`."""
    ordered = sorted(ranks)
    parts: list[str] = []
    start = previous = ordered[0]
    for rank in [*ordered[1:], None]:
        if rank is not None and rank == previous + 1:
            previous = rank
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        if rank is not None:
            start = previous = rank
    return ",".join(parts)


class Folder:
    """Holds each rank's pieces back for a moment, so that equal ones come out once.

    Order within a rank is kept. A piece comes out when every other rank has brought its equal
    or has ended, at the latest after `HOLD_SECONDS`.

    Args:
        ranks: that run the cell.
        show: called with the ranks and the piece.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        show: Callable[[tuple[int, ...], Piece], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queues: dict[int, collections.deque[tuple[Piece, float]]] = {
            rank: collections.deque() for rank in ranks
        }
        self._counts: dict[int, collections.Counter[Piece]] = {
            rank: collections.Counter() for rank in self._queues
        }
        self._ended: set[int] = set()
        self._show = show
        self._clock = clock

    def add(self, rank: int, piece: Piece) -> None:
        """Take in a rank's next piece."""
        self._queues[rank].append((piece, self._clock()))
        self._counts[rank][piece] += 1

    def end(self, rank: int) -> None:
        """Note that a rank brings nothing more."""
        self._ended.add(rank)

    def release(self, *, everything: bool = False) -> None:
        """Show what need not be held any longer; `everything` holds nothing back."""
        while (choice := self._choose(everything)) is not None:
            ranks = tuple(r for r, q in self._queues.items() if q and q[0][0] == choice)
            for rank in ranks:
                piece, _ = self._queues[rank].popleft()
                self._counts[rank][piece] -= 1
                if not self._counts[rank][piece]:
                    del self._counts[rank][piece]
            self._show(ranks, choice)

    def _choose(self, everything: bool) -> Piece | None:
        """Return the front piece to show next; None when all must be held."""
        fronts = [(q[0][0], q[0][1]) for q in self._queues.values() if q]
        crossed: Piece | None = None
        for piece, arrived in fronts:
            others = [r for r, q in self._queues.items() if not q or q[0][0] != piece]
            if any(self._counts[rank][piece] for rank in others):
                # Its equal stands further back elsewhere: what stands before that goes first.
                crossed = crossed or piece
                continue
            may_come = any(rank not in self._ended for rank in others)
            if everything or not may_come or self._clock() - arrived >= HOLD_SECONDS:
                return piece
            # Lower ranks first, where nothing else decides.
            return None
        return crossed
