"""Ranks that serve a model together: who they are, and what each computes with (ranks)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nbdist.serve.cut import cut_copy
from nbdist.serve.lockstep import ToldClock
from nbdist.serve.quantise import quantise
from nbdist.serve.resident import bare_model, named_weights, resident_copy, shared_view
from nbdist.serve.shards import shared_shards, sharing_ranks
from nbdist.serve.wire import Wire, own_group

if TYPE_CHECKING:
    from torch import nn

    from nbdist.serve.quantise import Bits


__all__ = ["Crew", "crew_of", "served_model"]


@dataclass(frozen=True, slots=True)
class Crew:
    """The ranks of one replica; the first of them answers.

    Attributes:
        ranks: in the default group.
        wire: for steps at any time.
        turn_wire: for steps between updates; None without such.
        clock: of this rank's engine.
    """

    ranks: list[int]
    wire: Wire
    turn_wire: Wire | None
    clock: ToldClock

    @property
    def is_first(self) -> bool:
        """Whether this rank answers."""
        return dist.get_rank() == self.ranks[0]


def crew_of(model: nn.Module, *, tp: int, share: bool, turns: bool, guesses: bool) -> Crew | None:
    """Return the ranks to serve with; None when each rank serves alone. Collective over: them.

    Raises:
        ValueError: `tp` does not divide the ranks, or a sharded model was to guess tokens ahead.
        ServeError: the parts of a shared model cannot be served.
    """
    if share and any(isinstance(t, DTensor) for _, t in named_weights(bare_model(model))):
        ranks = sharing_ranks(model)
        if guesses:
            raise ValueError(
                f"speculation was asked for with share=True on the shards of ranks {ranks}: its "
                "pace differs from rank to rank; leave speculation out"
            )
    elif tp > 1:
        ranks = _block(tp)
    else:
        return None
    wire = Wire(own_group(ranks))
    return Crew(ranks, wire, Wire(own_group(ranks)) if turns else None, ToldClock())


def _block(tp: int) -> list[int]:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size % tp:
        raise ValueError(
            f"tp={tp} was asked for on {world_size} ranks: replicas of {tp} ranks do not cover "
            f"them; set tp to a divisor of {world_size}"
        )
    first = dist.get_rank() // tp * tp
    return list(range(first, first + tp))


def served_model(
    model: nn.Module, crew: Crew | None, *, share: bool, bits: Bits | None
) -> nn.Module:
    """Return what this rank computes with. Collective over: the crew, and what shards the model."""
    if share:
        return shared_shards(model) if crew else shared_view(model)
    if crew:
        return cut_copy(model, crew.ranks)
    copy = resident_copy(model)
    return copy if bits is None else quantise(copy, bits)
