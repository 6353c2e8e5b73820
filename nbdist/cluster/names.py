"""Asks ranks about their names (client)."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbdist.cluster.names_table import NamesTable
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

__all__ = ["ask_names", "list_names"]

LIST_SECONDS = 10.0  # sums of large tensors take a while


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
