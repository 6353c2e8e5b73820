"""What ranks serve, and its end (client; torch-free)."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from nbdist.errors import ServeError
from nbdist.messages import ListServed, ModelsUnloaded, ServedList, UnloadModels
from nbdist.serve.asking import ask_ranks

if TYPE_CHECKING:
    from nbdist.messages import ModelServed
    from nbdist.serve.ports import RanksPort

__all__ = ["served_models", "unload"]

_LIST_SECONDS = 5.0


def served_models(ranks: RanksPort) -> list[ModelServed]:
    """Ask all ranks what they serve; by model, then by rank. Ranks that hang are left out."""
    query = ListServed(query_id=uuid.uuid4().hex)
    answers, _ = ask_ranks(ranks, query, ServedList, _LIST_SECONDS)
    found = [one for answer in answers.values() for one in answer.models]
    return sorted(found, key=lambda one: (one.model, one.rank))


def unload(
    ranks: RanksPort,
    model: str | None = None,
    *,
    now: bool = False,
    timeout_seconds: float | None = None,
) -> dict[int, ModelsUnloaded]:
    """Stop serving a model on all ranks, and wait until its memory is given back.

    From the first moment no replica takes a new request. Requests that run are finished first;
    a cell that runs on the ranks is not waited for.

    Args:
        ranks: the world, or another way to the ranks.
        model: the name given to `serve`; None unloads all models.
        now: end running requests as `cancelled`, with the text they have.
        timeout_seconds: how long to wait for them; None for as long as they take.

    Returns:
        By rank: which models were unloaded, and the memory of the process before and after.

    Raises:
        ServeError: no rank serves the model, or requests still run after the time; the replicas
            go on draining then.
    """
    query = UnloadModels(query_id=uuid.uuid4().hex, model=model, now=now)
    answers, late = ask_ranks(ranks, query, ModelsUnloaded, timeout_seconds)
    if late:
        raise ServeError(
            f"unload of {_named(model)} was to take {timeout_seconds:g} s, but requests still run "
            f"on ranks {late}; they take no new ones. Wait longer, or use `now=True` to cancel them"
        )
    done = {rank: answer for rank, answer in answers.items() if answer.models}
    if not done:
        raise ServeError(
            f"{_named(model)} was to be unloaded, but no rank serves it; `%distributed serve` and "
            "`World.served` list what is served"
        )
    return done


def _named(model: str | None) -> str:
    return "every model" if model is None else f"model {model!r}"
