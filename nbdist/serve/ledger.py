"""The requests of a router that have not ended, each at one rank (client; torch-free)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading

    from nbdist.serve.balance import Balance
    from nbdist.serve.generation import Generation

__all__ = ["Ledger", "Sent"]

# a rank ends an overdue request itself; when it has not said so by then, it hangs
_GRACE_SECONDS = 1.0


@dataclass(slots=True)
class Sent:
    """A request that has not ended: who waits for it, and where it runs."""

    generation: Generation
    rank: int
    retried: bool = False
    cancelled: bool = False


class Ledger:
    """Takes each request out exactly once: who took it out gives it its ending.

    Args:
        changed: the router's condition; told whenever a request is taken out.
        books: of the replicas; relieved of what is taken out.
    """

    def __init__(self, changed: threading.Condition, books: Balance) -> None:
        self._changed = changed
        self._books = books
        self._sent: dict[str, Sent] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def all(self) -> list[Sent]:
        """Return what has not ended."""
        with self._changed:
            return list(self._sent.values())

    def get(self, request_id: str) -> Sent | None:
        """Return a request; None when it has ended."""
        return self._sent.get(request_id)

    def add(self, sent: Sent) -> None:
        """Note a request that is about to be sent."""
        self._sent[sent.generation.request_id] = sent

    def forget(self, request_id: str, rank: int) -> Sent | None:
        """Take out a request of this rank; None when it is not there any more."""
        with self._changed:
            sent = self._sent.get(request_id)
            if sent is None or sent.rank != rank:
                return None
            del self._sent[request_id]
            self._books.release(rank, request_id)
            self._changed.notify_all()
            return sent

    def forget_rank(self, rank: int) -> list[Sent]:
        """Take out all requests of a rank."""
        with self._changed:
            lost = [sent for sent in self._sent.values() if sent.rank == rank]
            for sent in lost:
                del self._sent[sent.generation.request_id]
            self._changed.notify_all()
            return lost

    def overdue(self) -> tuple[list[Sent], float | None]:
        """Return what its rank should have ended a second ago, and the seconds to the next."""
        late: list[Sent] = []
        waits: list[float] = []
        for sent in self.all():
            wait = sent.generation.remaining_seconds(_GRACE_SECONDS)
            if wait == 0:
                late.append(sent)
            elif wait is not None:
                waits.append(wait)
        return late, min(waits, default=None)
