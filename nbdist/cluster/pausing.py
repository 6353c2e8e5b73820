"""Has a cell stop inside `fit()` after a step, so that it goes on there on other ranks (client)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nbdist.cluster.link import WorldLink
from nbdist.errors import RankBusyError, RankLostError
from nbdist.messages import Message, PauseCell, PauseSite, RankDone, RankError, RunCell

__all__ = ["Pause", "Wanted", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A number of ranks that another thread wants while a cell runs.

    Attributes:
        num_ranks: how many.
        on_stage: is told in words what is done.
        answer: a `Resized`, or why it was not done.
    """

    num_ranks: int
    on_stage: Callable[[str], None] | None
    answer: Future[Any] = field(default_factory=Future)


class Pause:
    """Stops one cell: first all ranks tell where they are, then all are asked to stop.

    Args:
        link: to the ranks.
        request: the cell.
        wanted: what it is stopped for.

    Attributes:
        is_on: the ranks have been asked to stop.
        call: the `fit()` that they stop in.
    """

    def __init__(self, link: WorldLink, request: RunCell, wanted: Wanted) -> None:
        self._link = link
        self._request = request
        self.wanted = wanted
        self.is_on = False
        self.call: tuple[int, ...] = ()
        self._calls: dict[int, tuple[int, ...]] = {}
        self._ended: set[int] = set()
        self._post(commit=False)

    @property
    def is_over(self) -> bool:
        """Whether the cell has stopped on all ranks, to go on later."""
        return self._ended == set(self._request.ranks)

    @property
    def is_refused(self) -> bool:
        """Whether the cell is not to stop."""
        return self.wanted.answer.done()

    def take(self, event: PauseSite) -> None:
        """Note what a rank says; ask all to stop when the last one has said where it is."""
        if self.is_refused or self.is_on:
            return
        if event.problem:
            self.refuse(f"rank {event.rank}: {event.problem}")
            return
        self._calls[event.rank] = event.call
        if len(self._calls) < len(self._request.ranks):
            return
        if len(set(self._calls.values())) > 1:
            self.refuse("the ranks are not all in the same call of fit()")
            return
        self.call = event.call
        self.is_on = True
        self._post(commit=True)

    def takes(self, event: Message) -> bool:
        """Return whether an event tells of nothing but the stop that was asked for."""
        if not self.is_on or self.is_refused:
            return False
        if isinstance(event, RankError):
            return event.name == KeyboardInterrupt.__name__
        if isinstance(event, RankDone) and event.status == "interrupted":
            self._ended.add(event.rank)
            return True
        return False

    def refuse(self, why: str) -> None:
        """Answer that it is not done; once."""
        if not self.is_refused:
            refuse(self.wanted, why)

    def _post(self, *, commit: bool) -> None:
        for rank in self._request.ranks:
            with suppress(RankLostError):
                self._link.post(rank, PauseCell(cell_id=self._request.cell_id, commit=commit))


def refuse(wanted: Wanted, why: str) -> None:
    """Answer that a number of ranks cannot be had while the cell runs."""
    wanted.answer.set_exception(
        RankBusyError(
            f"{wanted.num_ranks} ranks were asked for while a cell runs; it can go on with others "
            f"only inside a `trainer.fit()` on all ranks, but {why}; wait for the cell, or stop it"
        )
    )
