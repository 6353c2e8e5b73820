"""Copies of a run's state in host memory: this rank's own, and its neighbour's (ranks).

Every K steps a rank copies what only it has into its own host memory and sends it to the next
rank, while the step after it runs. The last two copies are kept: ranks may be one step apart when
one of them dies. Peer copies in memory after Gemini (SOSP 2023, doi 10.1145/3600006.3613145).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbdist.errors import NbdistError
from nbdist.train.mesh import Axis, axis_rank
from nbdist.train.parallelize import applied_to
from nbdist.train.survival.state import DATA_AT, Layout, Slot, layout_of

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Mirror", "Offer", "place_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a rank can give after a failure.

    Attributes:
        place: equal for ranks with equal weights, from `place_of`.
        step: steps that the rank has done.
        own: steps of the copies of its own state.
        neighbour: the rank whose copies it keeps; None for none.
        kept: steps of those copies.
        is_whole: they hold the weights; else random states only, as others have equal weights.
    """

    place: tuple[int, ...]
    step: int
    own: tuple[int, ...]
    neighbour: int | None
    kept: tuple[int, ...]
    is_whole: bool


class Mirror:
    """Keeps the copies. Collective over: the default group, when made and in `take`.

    Args:
        model: from `parallelize`.
        optimizer: of the model.
        mesh: the whole mesh.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        world_size = self.world_size
        self.place = place_of(model, mesh)
        self._stage = axis_rank(mesh, Axis.PP)
        self._to, self._from = (self.rank + 1) % world_size, (self.rank - 1) % world_size
        self._group = dist.new_group(backend="gloo")
        places: list[tuple[int, ...]] = [()] * world_size
        dist.all_gather_object(places, self.place)
        self._is_replica = [places.count(place) > 1 for place in places]
        self._layout, self._kept_layout = Layout(), Layout()
        self._is_settled = False
        self._own: list[Slot] = [Slot(None), Slot(None)]
        self._kept: list[Slot] = [Slot(None), Slot(None)]
        self._turn = 0
        self._sent: tuple[Slot, list[dist.Work]] | None = None

    def take(self, step: int, notes: list[float]) -> None:
        """Copy this rank's state after `step` steps and begin to send it.

        Args:
            step: steps done.
            notes: at most six numbers to keep with it.

        Raises:
            NbdistError: weights or optimizer have other tensors than at the first copy.
        """
        self.settle()
        layout, tensors = layout_of(self._model, self._optimizer)
        if not self._is_settled:
            self._tell_layout(layout)
        elif layout != self._layout:
            raise NbdistError(
                f"the state was to be mirrored after step {step}, but the model or its optimizer "
                "has other tensors than when fit() began; add or freeze weights between calls of "
                'fit(), or set TrainConfig(on_failure="stop")'
            )
        own, kept = self._next_slots()
        own.fill(step, tensors, notes)
        if self._to == self.rank:
            return
        works = [
            dist.isend(own.flat[:DATA_AT] if self.is_replica else own.flat, self._to, self._group),
            dist.irecv(kept.flat, self._from, self._group),
        ]
        self._sent = (kept, [work for work in works if work is not None])

    @property
    def is_replica(self) -> bool:
        """Whether another rank has equal weights."""
        return self._is_replica[self.rank]

    def settle(self) -> None:
        """Wait until the last copy has arrived.

        Before a collective of the next step: whoever is through that knows that all copies of
        this step are complete, so the ones before may be written over.
        """
        if self._sent is None:
            return
        kept, works = self._sent
        self._sent = None
        for work in works:
            work.wait()
        kept.is_valid = True

    def abandon(self) -> None:
        """Drop the copy that was under way when the group was freed."""
        if self._sent is not None:
            kept, works = self._sent
            self._sent = None
            # All of them: nothing may write into a slot any more.
            arrived = [_has_arrived(work) for work in works]
            kept.is_valid = all(arrived)

    def offer(self, step: int) -> Offer:
        """Return what this rank, which has done `step` steps, can give. Not collective."""
        return Offer(
            place=self.place,
            step=step,
            own=_steps(self._own),
            neighbour=self._from if self._from != self.rank else None,
            kept=_steps(self._kept),
            is_whole=not self._is_replica[self._from],
        )

    def own_at(self, step: int) -> Slot:
        """Return the copy of this rank's own state after a step."""
        return next(slot for slot in self._own if slot.step == step)

    def kept_at(self, step: int) -> Slot:
        """Return the copy of the neighbour's state after a step."""
        return next(slot for slot in self._kept if slot.step == step)

    def copies(self) -> dict[int, list[Slot]]:
        """Return the states that this rank holds, its own first, by step. Not collective."""
        found: dict[int, list[Slot]] = {}
        for slot in self._own:
            if slot.step is not None:
                kept = [one for one in self._kept if one.step == slot.step and one.layout.entries]
                found[slot.step] = [slot, *kept]
        return found

    def _tell_layout(self, layout: Layout) -> None:
        """Tell the next rank what will come; again after the first step, which makes state."""
        layout.locate(self._model, self._optimizer, self._stage)
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, layout, group=self._group)
        self._is_settled = all(one.has_optimizer_state for one in everyone)
        self._layout, self._kept_layout = layout, everyone[self._from]

    def _next_slots(self) -> tuple[Slot, Slot]:
        """Return the older two slots, made anew where the layout is another one."""
        turn, self._turn = self._turn, 1 - self._turn
        if self._own[turn].layout != self._layout:
            pinned = any(entry.on_device for entry in self._layout.entries)
            self._own[turn] = Slot(self._layout, pinned=pinned)
        kept = Layout() if self._is_replica[self._from] else self._kept_layout
        if self._kept[turn].layout != kept:
            self._kept[turn] = Slot(kept)
        self._kept[turn].is_valid = False
        return self._own[turn], self._kept[turn]


def place_of(model: nn.Module, mesh: DeviceMesh) -> tuple[int, ...]:
    """Return what is equal for ranks with equal weights, and differs for others."""
    applied = applied_to(model)
    if applied is None or applied.strategy == "ddp":
        return ()
    coordinates = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True)
    return tuple(where for axis, where in coordinates if axis != Axis.DP_REPLICATE)


def _steps(slots: list[Slot]) -> tuple[int, ...]:
    return tuple(sorted(slot.step for slot in slots if slot.step is not None))


def _has_arrived(work: dist.Work) -> bool:
    try:
        work.wait()
    except RuntimeError:
        return False
    return True
