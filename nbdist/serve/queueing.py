"""A bounded queue of requests that wait for an engine's batch (anywhere; torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import Overloaded

if TYPE_CHECKING:
    from nbdist.serve.engine import EngineLimits, EngineRequest

__all__ = ["admit"]


def admit(
    request: EngineRequest, known: dict[str, EngineRequest], limits: EngineLimits, max_waiting: int
) -> None:
    """Put a request into an engine's books.

    Raises:
        ValueError: a request of this id has not ended yet.
        Overloaded: `max_waiting` requests wait already.
    """
    if request.request_id in known:
        raise ValueError(f"request {request.request_id!r} is already running; use a fresh id")
    depth = len(known) - limits.max_batch
    if depth >= max_waiting:
        raise Overloaded(
            f"{len(known)} requests are running or waiting on this replica, and it takes "
            f"max_batch={limits.max_batch} + max_waiting={max_waiting}; send the request again "
            "when some have ended",
            depth=depth,
            limit=max_waiting,
        )
    known[request.request_id] = request
