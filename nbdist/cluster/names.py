"""Asks ranks about their names, and the answer as one table (client)."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.errors import RankLostError
from nbdist.messages import (
    CompleteQuery,
    InspectQuery,
    Message,
    NameRow,
    NamesAnswer,
    NamesQuery,
)

if TYPE_CHECKING:
    from nbdist.serve.ports import RanksPort

__all__ = ["NamesTable", "ask_names", "list_names"]

LIST_SECONDS = 10.0  # sums of large tensors take a while


@dataclass(frozen=True, slots=True)
class NamesTable:
    """The names that the user has made on the ranks.

    Attributes:
        rows: what each rank says of a name, `{name: {rank: row}}`.
        ranks: that have answered.
        busy: ranks that run a cell, by rank the cell's id; nothing is known of their names.
        silent: ranks that are gone or did not answer.
    """

    rows: dict[str, dict[int, NameRow]] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    busy: dict[int, str] = field(default_factory=dict)
    silent: tuple[int, ...] = ()

    def differs(self, name: str) -> bool | None:
        """Return whether ranks hold different values; None when they were not compared.

        A name that some of the ranks lack differs.
        """
        found = self.rows[name]
        rows = list(found.values())
        facts = {(row.type_name, row.dtype, row.placements) for row in rows}
        if len(rows) < len(self.ranks) or len(facts) > 1:
            return True
        if len(rows) < 2 or any(not row.digest for row in rows):
            return None
        return len({row.digest for row in rows}) > 1

    def is_sampled(self, name: str) -> bool:
        """Return whether the comparison covers only a sample and the sum."""
        return any(row.is_sampled for row in self.rows[name].values())


def list_names(world: RanksPort, ranks: Sequence[int], pattern: str = "") -> NamesTable:
    """Return the names of ranks that match a pattern such as `x*`; empty for all."""
    query = NamesQuery(query_id=uuid.uuid4().hex, pattern=pattern)
    answers = ask_names(world, query, ranks, LIST_SECONDS)
    rows: dict[str, dict[int, NameRow]] = {}
    idle = [rank for rank in sorted(answers) if not answers[rank].busy]
    for rank in idle:
        for row in answers[rank].rows:
            rows.setdefault(row.name, {})[rank] = row
    return NamesTable(
        rows=dict(sorted(rows.items())),
        ranks=tuple(idle),
        busy={rank: answer.busy for rank, answer in answers.items() if answer.busy},
        silent=tuple(sorted(set(ranks) - set(answers))),
    )


def ask_names(
    world: RanksPort,
    query: CompleteQuery | InspectQuery | NamesQuery,
    ranks: Sequence[int],
    timeout_seconds: float,
) -> dict[int, NamesAnswer]:
    """Send a query to ranks and return the answers that came in time, by rank."""
    inbox: queue.SimpleQueue[NamesAnswer] = queue.SimpleQueue()

    def take(_rank: int, event: Message) -> None:
        if isinstance(event, NamesAnswer) and event.query_id == query.query_id:
            inbox.put(event)

    stop = world.subscribe(NamesAnswer, take)
    answers: dict[int, NamesAnswer] = {}
    waiting = set(ranks)
    deadline = time.monotonic() + timeout_seconds
    try:
        for rank in ranks:
            try:
                world.post(rank, query)
            except RankLostError:
                waiting.discard(rank)
        while waiting and (left := deadline - time.monotonic()) > 0:
            try:
                answer = inbox.get(timeout=left)
            except queue.Empty:
                break
            answers[answer.rank] = answer
            waiting.discard(answer.rank)
    finally:
        stop()
    return answers
