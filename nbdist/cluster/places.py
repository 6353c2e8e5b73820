"""Who is which rank when the number of ranks changes (client; pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Places", "plan_places"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Who is which rank afterwards.

    Attributes:
        moves: `{old: new}` of living ranks whose number changes.
        leaving: living ranks that end.
        new: ranks that a process is started for.
    """

    moves: dict[int, int]
    leaving: list[int]
    new: list[int]


def plan_places(alive: Sequence[int], num_ranks: int) -> Places:
    """Return who becomes which rank when there are to be `num_ranks`.

    A rank keeps its number if there is one like it; else it takes that of a lost rank, else it
    ends.
    """
    kept = [rank for rank in alive if rank < num_ranks]
    free = [rank for rank in range(num_ranks) if rank not in kept]
    beyond = [rank for rank in alive if rank >= num_ranks]
    moves = dict(zip(beyond, free, strict=False))
    return Places(moves=moves, leaving=beyond[len(free) :], new=free[len(beyond) :])
