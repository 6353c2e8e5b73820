"""Makes the state of a rank of one mesh out of what the ranks of another had (ranks).

Every rank sends the others the parts that they need, a few tensors at a time: nobody holds more
than its own state twice. Which parts those are is arithmetic on the tensors' offsets (`boxes`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nbdist.train.mesh import Axis, axis_rank
from nbdist.train.survival.boxes import Held, Key, Transfer, plan_transfers
from nbdist.train.survival.state import DATA_AT, Entry, Layout, Slot, layout_of, optimized

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from nbdist.train.trainer import Trainer

__all__ = ["Copies", "reshard"]

Copies = dict[int, list[Slot]]
"""States that a rank holds, its own first, by the step after which they were taken."""

_ROUND_ELEMENTS = 8 << 20


def reshard(trainer: Trainer, copies: Copies) -> Slot | None:
    """Return this rank's state of the newest step whose state is whole. Collective over: all ranks.

    Args:
        trainer: on the new mesh, without state.
        copies: of the old mesh; none on a new rank.

    Returns:
        The state; without random states on a new rank. None when no step is whole.
    """
    told = {step: [slot.layout for slot in slots] for step, slots in copies.items()}
    everyone: list[dict[int, list[Layout]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, told)
    steps = [set(one) for one in everyone if one]
    for step in sorted(set.intersection(*steps) if steps else (), reverse=True):
        layouts = [one.get(step, []) for one in everyone]
        wanted = _layout_for(trainer, layouts)
        plan = plan_transfers(_held(layouts), _held(_gathered(wanted)))
        if plan is not None:
            slot = Slot(wanted)
            _exchange(plan, copies.get(step, []), slot)
            _head(slot, step, copies)
            return slot
    return None


def _gathered(wanted: Layout) -> list[list[Layout]]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wanted)
    return [[layout] for layout in everyone]


def _held(layouts: list[list[Layout]]) -> dict[Key, list[Held]]:
    found: dict[Key, list[Held]] = {}
    for rank, states in enumerate(layouts):
        for number, layout in enumerate(states):
            for place, (key, box) in enumerate(zip(layout.keys(), layout.boxes, strict=True)):
                found.setdefault(key, []).append(Held(rank, number, place, box))
    return found


def _layout_for(trainer: Trainer, layouts: list[list[Layout]]) -> Layout:
    """Return which tensors this rank is to have; the optimizer's are those that the ranks had."""
    stage = axis_rank(trainer.mesh, Axis.PP)
    wanted, _ = layout_of(trainer.model, trainer.optimizer)
    weights = optimized(trainer.optimizer)
    found: dict[tuple[int, str], Entry] = {}
    for layout in (one for states in layouts for one in states if one.stage == stage):
        wanted.plain.update(layout.plain)
        for entry in layout.entries:
            if entry.kind == "optimizer":
                found.setdefault((entry.index, entry.key), entry)
    wanted.entries += [_like(weights[index], found[index, key]) for index, key in sorted(found)]
    wanted.locate(trainer.model, trainer.optimizer, stage)
    return wanted


def _like(weight: Tensor, old: Entry) -> Entry:
    """Return an entry of a weight's optimizer state: cut as the weight, unless it is one number."""
    if not old.is_cut and (weight.ndim == 0 or old.shape != tuple(weight.shape)):
        return old
    is_cut = isinstance(weight, DTensor)
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return replace(old, shape=tuple(local.shape), is_cut=is_cut, on_device=local.is_cuda)


def _exchange(plan: list[list[Transfer]], sources: list[Slot], target: Slot) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sent_from = [slot.views() for slot in sources]
    into = target.views()
    for some in _rounds(plan):
        outgoing: list[list[Tensor]] = [[] for _ in range(world_size)]
        incoming: list[list[Tensor]] = [[] for _ in range(world_size)]
        for one in some:
            if one.source.rank == rank:
                part = sent_from[one.source.slot][one.source.place]
                outgoing[one.target.rank].append(_as_bytes(one.source.box.cut(part, one.shared)))
            if one.target.rank == rank:
                room = one.target.box.cut(into[one.target.place], one.shared)
                incoming[one.source.rank].append(room)
        sizes = [sum(len(part) for part in parts) for parts in outgoing]
        expected = [sum(room.numel() * room.itemsize for room in rooms) for rooms in incoming]
        received = torch.empty(sum(expected), dtype=torch.uint8)
        nothing = torch.empty(0, dtype=torch.uint8)
        together = torch.cat([nothing, *(part for parts in outgoing for part in parts)])
        dist.all_to_all_single(received, together, expected, sizes)
        _scatter(received, [room for rooms in incoming for room in rooms])


def _rounds(plan: list[list[Transfer]]) -> Iterator[list[Transfer]]:
    """Yield the transfers of a few tensors at a time, the same on all ranks."""
    some: list[Transfer] = []
    for transfers in plan:
        some += transfers
        if sum(one.shared.num_elements for one in some) >= _ROUND_ELEMENTS:
            yield some
            some = []
    if some:
        yield some


def _as_bytes(part: Tensor) -> Tensor:
    return part.reshape(-1).contiguous().view(torch.uint8)


def _scatter(received: Tensor, rooms: list[Tensor]) -> None:
    at = 0
    for room in rooms:
        num_bytes = room.numel() * room.itemsize
        # cloned: a part may begin where its dtype cannot
        part = received[at : at + num_bytes].clone().view(room.dtype)
        room.copy_(part.view(room.shape))
        at += num_bytes


def _head(slot: Slot, step: int, copies: Copies) -> None:
    """Give a state its step, its notes and, on a rank that had some, its random states."""
    own = copies[step][0] if copies else None
    notes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(notes, own.notes.tolist() if own else None)
    if own is not None:
        slot.flat[:DATA_AT].copy_(own.flat[:DATA_AT])
    else:
        slot.notes.copy_(torch.tensor(next(one for one in notes if one is not None)).double())
    slot.seal(step)
