"""Who serves a model: the ranks that said so, asked again when needed (client; torch-free)."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from nbdist.errors import RankLostError, ServeError
from nbdist.messages import Message, ModelServed, ServeQuery
from nbdist.serve.balance import Balance, nobody_serves

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from nbdist.serve.ports import RanksPort

__all__ = ["Roster"]


class Roster:
    """The replicas of one model, and their books.

    Args:
        ranks: the way to the ranks.
        model: its name.
        max_waiting: see `Balance`.
        changed: the router's condition, held for every change of the books.
        on_lost: called with a rank that turns out to be lost.
    """

    def __init__(
        self,
        ranks: RanksPort,
        model: str,
        *,
        max_waiting: int,
        changed: threading.Condition,
        on_lost: Callable[[int, str], None],
    ) -> None:
        self.books = Balance(max_waiting)
        self._ranks = ranks
        self._model = model
        self._changed = changed
        self._on_lost = on_lost
        self._silent: set[int] = set()

    def refresh(self, query_seconds: float) -> None:
        """Ask all ranks what they serve, and wait for the answers.

        Raises:
            ServeError: no rank serves the model.
        """
        query = ServeQuery(query_id=uuid.uuid4().hex, model=self._model)
        with self._changed:
            self._silent = set(range(self._ranks.num_ranks))
        for rank in range(self._ranks.num_ranks):
            try:
                self._ranks.post(rank, query)
            except RankLostError:
                self._on_lost(rank, f"rank {rank} was lost")
        with self._changed:
            self._changed.wait_for(lambda: not self._silent, query_seconds)
            self.check()

    def check(self) -> None:
        """See that somebody serves the model.

        Raises:
            ServeError: nobody does.
        """
        if not self.books:
            raise ServeError(nobody_serves(self._model, self._ranks.num_ranks))

    def on_served(self, rank: int, event: Message) -> None:
        """Note what a rank says of its replica; requests of one that has gone end by themselves."""
        if not isinstance(event, ModelServed) or event.model != self._model:
            return
        with self._changed:
            known = self.books.served.get(rank)
            if event.state != "gone":
                self.books.add(rank, event)
            elif known is not None and known.version <= (event.version or known.version):
                self.books.remove(rank)
            self._silent.discard(rank)
            self._changed.notify_all()

    def drain(self, rank: int, timeout_seconds: float | None) -> bool:
        """Choose a rank no more, and wait until what it has is done; whether it is."""
        with self._changed:
            self.books.drain(rank)
            return self._changed.wait_for(
                lambda: not self.books.outstanding.get(rank), timeout_seconds
            )

    def undrain(self, rank: int) -> None:
        """Let a drained rank be chosen again."""
        with self._changed:
            self.books.undrain(rank)

    def remove(self, rank: int) -> None:
        """Forget a rank that was lost or serves no more."""
        with self._changed:
            self._silent.discard(rank)
            self.books.remove(rank)
            self._changed.notify_all()
