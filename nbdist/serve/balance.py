"""Which replica takes the next request: the fewest unfinished first (client; torch-free)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.errors import Overloaded

if TYPE_CHECKING:
    from nbdist.messages import ModelServed

__all__ = ["Balance"]


@dataclass(slots=True)
class _Load:
    served: ModelServed
    outstanding: set[str] = field(default_factory=set)
    last_used: int = 0


class Balance:
    """The books of one model's replicas, by rank; the router's lock guards it.

    Args:
        max_waiting: most requests that a replica has beyond its `max_batch`.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._loads: dict[int, _Load] = {}
        self._uses = itertools.count(1)

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def served(self) -> dict[int, ModelServed]:
        """What each rank said of its replica."""
        return {rank: load.served for rank, load in sorted(self._loads.items())}

    @property
    def outstanding(self) -> dict[int, int]:
        """Unfinished requests of each rank."""
        return {rank: len(load.outstanding) for rank, load in sorted(self._loads.items())}

    def add(self, rank: int, served: ModelServed) -> None:
        """Note a replica, or a new version of a known one."""
        if rank in self._loads:
            self._loads[rank].served = served
        else:
            self._loads[rank] = _Load(served)

    def remove(self, rank: int) -> None:
        """Forget a rank's replica."""
        self._loads.pop(rank, None)

    def assign(self, request_id: str) -> int:
        """Choose a rank for a request and count it there; ties go to the one used longest ago.

        Raises:
            Overloaded: every replica has as many requests as it takes.
        """
        free = {
            rank: (len(load.outstanding), load.last_used)
            for rank, load in self._loads.items()
            if len(load.outstanding) < load.served.max_batch + self._max_waiting
        }
        if not free:
            raise self._overloaded()
        rank = min(free, key=lambda r: free[r])
        self._loads[rank].outstanding.add(request_id)
        self._loads[rank].last_used = next(self._uses)
        return rank

    def release(self, rank: int, request_id: str) -> None:
        """A request of this rank has ended."""
        if rank in self._loads:
            self._loads[rank].outstanding.discard(request_id)

    def _overloaded(self) -> Overloaded:
        loads = self._loads.values()
        depth = sum(len(load.outstanding) - load.served.max_batch for load in loads)
        limit = self._max_waiting * len(self._loads)
        return Overloaded(
            f"{depth} requests wait on ranks {sorted(self._loads)}, and at most max_waiting="
            f"{self._max_waiting} a replica may; send the request again when some have ended, or "
            "call `serve` with a larger max_batch",
            depth=depth,
            limit=limit,
        )
