"""Many ranks' output as one text: equal lines once, with the span of their ranks (client)."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Piece", "Folder", "span"]

HOLD_SECONDS = 0.3


class Piece:
    """One line of a rank, one display, or one ended progress bar.

    Attributes:
        stream: `stdout`, `stderr` or `display`.
        text: the line without its end; for a display its content as canonical JSON; for a
            progress bar its name.
        content: a display's content, a bar's key; None for a line.
        key: pieces with the same key are equal.
    """

    __slots__ = ("content", "key", "stream", "text")

    def __init__(self, stream: str, text: str, content: Any = None) -> None:
        self.stream = stream
        self.text = text
        self.content = content
        self.key = f"{stream} {text}"


@functools.lru_cache(maxsize=256)
def span(ranks: tuple[int, ...]) -> str:
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
        self._counts: dict[int, collections.Counter[str]] = {
            rank: collections.Counter() for rank in self._queues
        }
        self._ended: set[int] = set()
        self._show = show
        self._clock = clock

    def add(self, rank: int, piece: Piece) -> None:
        """Take in a rank's next piece."""
        self._queues[rank].append((piece, self._clock()))
        self._counts[rank][piece.key] += 1

    def end(self, rank: int) -> None:
        """Note that a rank brings nothing more."""
        self._ended.add(rank)

    def release(self, *, everything: bool = False) -> None:
        """Show what need not be held any longer; `everything` holds nothing back."""
        # Called for every line: no more work than one pass over the ranks.
        fronts = {rank: queue[0] for rank, queue in self._queues.items() if queue}
        now = self._clock()
        while fronts and (choice := self._choose(fronts, everything, now)) is not None:
            ranks = tuple(rank for rank, (piece, _) in fronts.items() if piece.key == choice.key)
            for rank in ranks:
                queue, counts = self._queues[rank], self._counts[rank]
                queue.popleft()
                if counts[choice.key] > 1:
                    counts[choice.key] -= 1
                else:
                    dict.pop(counts, choice.key)
                if queue:
                    fronts[rank] = queue[0]
                else:
                    del fronts[rank]
            self._show(tuple(sorted(ranks)), choice)

    def _choose(
        self, fronts: dict[int, tuple[Piece, float]], everything: bool, now: float
    ) -> Piece | None:
        """Return the front piece to show next, lower ranks first; None when all must be held."""
        crossed: Piece | None = None
        for rank in sorted(fronts):
            piece, arrived = fronts[rank]
            key = piece.key
            may_come = stands_behind = False
            for other, counts in self._counts.items():
                if other in fronts and fronts[other][0].key == key:
                    continue
                if key in counts:
                    stands_behind = True
                    break
                may_come = may_come or other not in self._ended
            if stands_behind:
                # Its equal stands further back elsewhere: what stands before that goes first.
                crossed = crossed or piece
            elif everything or not may_come or now - arrived >= HOLD_SECONDS:
                return piece
            else:
                return None
        return crossed
