"""From which step, and from whose memory, a run goes on after ranks have died (ranks; pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.train.survival.mirror import Offer

__all__ = ["Choice", "Source", "choose"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Who sends a new rank its state.

    Attributes:
        rank: has the weights.
        is_own: they are its own: it has equal ones.
        rng_rank: has the random states; None when nobody has, then they start anew.
    """

    rank: int
    is_own: bool
    rng_rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The step to go on from, and the source of every new rank."""

    step: int
    sources: dict[int, Source]


def choose(offers: list[Offer]) -> Choice | None:
    """Return the newest step that all ranks can go on from; None when there is none.

    A step with all random states comes before a newer one without.

    Args:
        offers: by rank; one without copies of its own is new.
    """
    survivors = {rank: offer for rank, offer in enumerate(offers) if offer.own}
    if not survivors:
        return None
    common = set.intersection(*(set(offer.own) for offer in survivors.values()))
    found = None
    for step in sorted(common, reverse=True):
        sources = {
            rank: _source(rank, offer.place, survivors, step)
            for rank, offer in enumerate(offers)
            if rank not in survivors
        }
        known = {rank: source for rank, source in sources.items() if source is not None}
        if len(known) < len(sources):
            continue
        choice = Choice(step=step, sources=known)
        if all(source.rng_rank is not None for source in known.values()):
            return choice
        found = found or choice
    return found


def _source(
    rank: int, place: tuple[int, ...], survivors: dict[int, Offer], step: int
) -> Source | None:
    keepers = [r for r, o in survivors.items() if o.neighbour == rank and step in o.kept]
    keeper = keepers[0] if keepers else None
    if keeper is not None and survivors[keeper].is_whole:
        return Source(rank=keeper, is_own=False, rng_rank=keeper)
    equal = [r for r, o in survivors.items() if o.place == place and step in o.own]
    return Source(rank=equal[0], is_own=True, rng_rank=keeper) if equal else None
