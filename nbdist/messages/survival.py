"""Messages about a cell that survives the death of a rank (anywhere; stdlib only)."""

from __future__ import annotations

from nbdist.messages.link import CellEvent
from nbdist.messages.wire import message

__all__ = ["CanRecover", "Recovered"]


@message("can_recover")
class CanRecover(CellEvent):
    """Rank to client: from now on the cell survives the death of a rank, or no longer.

    Attributes:
        on_failure: "heal" or "shrink"; empty when the cell no longer survives.
        min_ranks: fewest ranks to go on with.
        multiple_of: what their number must be a multiple of.
        max_failures: how many within `per_hours` are answered so.
        call: where the cell made the call that survives: line and column of its begin and end,
            lines from 1, columns in bytes from 0.
    """

    on_failure: str
    min_ranks: int = 1
    multiple_of: int = 1
    max_failures: int = 0
    per_hours: float = 1.0
    call: tuple[int, ...] = ()


@message("recovered")
class Recovered(CellEvent):
    """Rank to client: the rank goes on with the cell.

    Attributes:
        step: it goes on after.
        steps_lost: steps that are done again.
        source: where the state came from, in words.
        missing: names that a new rank could not be given.
        freed_at: wall-clock time at which the rank had left what the failure had broken, in
            seconds since 1970; 0 on a new rank.
    """

    step: int
    steps_lost: int
    source: str
    missing: tuple[str, ...] = ()
    freed_at: float = 0.0
