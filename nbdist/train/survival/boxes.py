"""Which part of every tensor a rank has, and who sends whom what when that changes (ranks).

The plan is a pure function of what all ranks have and want, so all ranks make the same one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Box", "Held", "Key", "Transfer", "box_of", "plan_transfers"]

Key = tuple[int, str, int, str]
"""Names a tensor of a run: stage of the pipeline, kind, index, name of an optimizer's state."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: where it begins in the whole one, and its shape."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Its size."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box | None:
        """Return what two parts of one tensor share; None when that is nothing."""
        begins = tuple(map(max, self.offset, other.offset))
        ends = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return None if any(size <= 0 for size in shape) else Box(begins, shape)

    def cut(self, part: Tensor, shared: Box) -> Tensor:
        """Return the view of `shared` in a tensor that holds this box."""
        where = tuple(
            slice(at - start, at - start + size)
            for at, start, size in zip(shared.offset, self.offset, shared.shape, strict=True)
        )
        return part[where]


@dataclass(frozen=True, slots=True)
class Held:
    """A box that a rank has, or wants: the `place`-th tensor of its `slot`-th state."""

    rank: int
    slot: int
    place: int
    box: Box


@dataclass(frozen=True, slots=True)
class Transfer:
    """One part that a rank gives another, or itself."""

    source: Held
    target: Held
    shared: Box


def box_of(tensor: Tensor) -> Box:
    """Return which part of the whole a rank's tensor is. Not collective."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Box(tuple(offset), tuple(shape))


def plan_transfers(
    held: dict[Key, list[Held]], wanted: dict[Key, list[Held]]
) -> list[list[Transfer]] | None:
    """Return the transfers, a list a tensor in an order that all ranks share.

    None when somebody wants what nobody has. Parts of one tensor are disjoint or equal.
    """
    plan = []
    for key in sorted(wanted):
        transfers = [t for target in wanted[key] for t in _sources(held.get(key, []), target)]
        filled = dict.fromkeys(wanted[key], 0)
        for transfer in transfers:
            filled[transfer.target] += transfer.shared.num_elements
        if any(count != target.box.num_elements for target, count in filled.items()):
            return None
        plan.append(transfers)
    return plan


def _sources(held: list[Held], target: Held) -> Iterator[Transfer]:
    """Yield where the parts of a box come from: from the rank itself where it has them."""
    holders: dict[Box, list[Held]] = {}
    for one in held:
        holders.setdefault(one.box, []).append(one)
    for box, equal in holders.items():
        if (shared := box.overlap(target.box)) is not None:
            own = [one for one in equal if one.rank == target.rank]
            yield Transfer((own or equal)[0 if own else target.rank % len(equal)], target, shared)
