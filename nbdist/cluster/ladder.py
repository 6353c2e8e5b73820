"""When the ranks of a cell that has to end are pressed harder (client; a clock is passed in)."""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet

__all__ = ["Ladder"]

# A rank that has ended makes no more calls: what the others wait for will not come.
AFTER_AN_END_SECONDS = 0.5
# Nobody has ended: a long call into native code may return to Python by itself.
AFTER_A_STOP_SECONDS = 1.2
# Trainers end after the same step, then each tidies up.
AFTER_A_STEP_SECONDS = 1.5
GIVE_UP_SECONDS = 5.0
TOP = 2


class Ladder:
    """Rung 0: the ranks run freely; 1: they were interrupted; 2: freed from their collectives.

    A rank may answer an interrupt by saying that it stops later, as a trainer does, which ends
    all ranks after the same step. While every waiting rank has said so there is no hurry.
    """

    def __init__(self) -> None:
        self.rung = 0
        self._asked = False
        self._since = 0.0
        self._failed = False
        self._ended = False
        self._deferring: set[int] = set()
        self._formatting: dict[int, float] = {}

    @property
    def is_climbing(self) -> bool:
        """Whether anything has happened after which the cell must end."""
        return self._since > 0

    def ask(self) -> None:
        """Note that a user or a time limit wants the cell to end: no rank has failed."""
        self._asked = True

    def climb(self, now: float) -> int:
        """Take the next rung and return it; the top one can be taken again."""
        self.rung = min(self.rung + 1, TOP)
        self._since = now
        return self.rung

    def take_end(self, now: float, *, failed: bool) -> None:
        """Note that the cell has ended on a rank."""
        if failed and not self.is_climbing:
            self._since = now
        self._failed |= failed
        if self._asked and not self._ended:
            self._ended = True
            self._since = now

    def take_failure(self, rank: int, now: float) -> None:
        """Note that a rank has raised and formats its error, which takes a second at first."""
        self._formatting[rank] = now
        self._failed = True
        if not self.is_climbing:
            self._since = now

    def pressed(self, waiting: AbstractSet[int], now: float) -> set[int]:
        """Return the ranks that are to be pressed: not those that are about to end by failing."""
        if self._asked:
            return set(waiting)
        return {r for r in waiting if now - self._formatting.get(r, -math.inf) > GIVE_UP_SECONDS}

    def take_deferral(self, rank: int) -> None:
        """Note that a rank will stop at a point of its own choice."""
        self._deferring.add(rank)

    def is_due(self, waiting: AbstractSet[int], now: float) -> bool:
        """Return whether the ranks that still run are to be pressed harder now."""
        if not self.is_climbing or self.rung >= TOP:
            return False
        grace = self._grace(waiting)
        is_over = grace is not None and now - self._since > grace
        return is_over and bool(self.pressed(waiting, now))

    def _grace(self, waiting: AbstractSet[int]) -> float | None:
        if self._failed or not self._asked:
            return AFTER_AN_END_SECONDS
        if waiting <= self._deferring:
            return AFTER_A_STEP_SECONDS if self._ended else None
        return AFTER_AN_END_SECONDS if self._ended else AFTER_A_STOP_SECONDS

    def is_deferred(self, waiting: AbstractSet[int], now: float) -> bool:
        """Return whether a stop has waited for a while for ranks that stop later."""
        return (
            self.is_climbing
            and self.rung < TOP
            and self._grace(waiting) is None
            and now - self._since > AFTER_AN_END_SECONDS
        )

    def is_hopeless(self, now: float) -> bool:
        """Return whether ranks that were freed still have not ended."""
        return self.rung == TOP and now - self._since > GIVE_UP_SECONDS
