"""One question to all ranks, and their answers (client; torch-free)."""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING, TypeVar

from nbdist.errors import RankLostError
from nbdist.messages import Message, Unhandled, topic_of

if TYPE_CHECKING:
    from nbdist.serve.ports import RanksPort

__all__ = ["ask_ranks"]

_Answer = TypeVar("_Answer", bound=Message)


def ask_ranks(
    ranks: RanksPort, query: Message, kind: type[_Answer], timeout_seconds: float | None
) -> tuple[dict[int, _Answer], list[int]]:
    """Send a query to all ranks and wait for one answer of each.

    Not to be called on the client's link thread, which brings the answers.

    Args:
        ranks: the way to the ranks.
        query: with a `query_id` of its own.
        kind: of the answers.
        timeout_seconds: how long to wait; None for as long as it takes.

    Returns:
        The answers by rank, without ranks that are lost or serve nothing; and the ranks that
        have not answered in time.
    """
    inbox: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    stops = [ranks.subscribe(one, lambda *said: inbox.put(said)) for one in (kind, Unhandled)]
    waiting = set(range(ranks.num_ranks))
    answers: dict[int, _Answer] = {}
    try:
        for rank in sorted(waiting):
            try:
                ranks.post(rank, query)
            except RankLostError:
                waiting.discard(rank)
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            rank, event = inbox.get(timeout=left)
            if isinstance(event, kind) and topic_of(event) == topic_of(query):
                answers[rank] = event
                waiting.discard(rank)
            elif isinstance(event, Unhandled) and (
                event.unhandled == "lost" or event.topic == topic_of(query)
            ):
                waiting.discard(rank)
    except queue.Empty:
        pass
    finally:
        for stop in stops:
            stop()
    return dict(sorted(answers.items())), sorted(waiting)
