"""Sharded weights that are there only while their block computes (ranks)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from nbdist.train.parallelize.data import blocks

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["LateWeight", "gather_in_forward"]


@dataclass(frozen=True, slots=True, eq=False)
class LateWeight:
    """A weight that is there only while its block computes.

    Attributes:
        name: in the model.
        owner: module whose weight it is.
        leaf: its name there.
        shard: of this rank.
        placements: to compute with: whole, or cut over `tp`.
        shape: of what this rank computes with.
        room: stands there in between; has the right type and device.
    """

    name: str
    owner: nn.Module
    leaf: str
    shard: DTensor
    placements: tuple[Placement, ...]
    shape: torch.Size
    room: nn.Parameter

    @classmethod
    def of(
        cls, empty: nn.Module, name: str, shard: DTensor, placements: tuple[Placement, ...]
    ) -> LateWeight:
        """Return the weight of a model without memory, and put its room there."""
        parent, _, leaf = name.rpartition(".")
        owner = empty.get_submodule(parent)
        shape = owner.get_parameter(leaf).shape
        room = torch.nn.Parameter(shard.to_local().new_empty(0), requires_grad=False)
        owner._parameters[leaf] = room
        return cls(name, owner, leaf, shard, placements, shape, room)

    def set(self, weight: Tensor) -> None:
        """Let the module compute with a tensor."""
        self.owner._parameters[self.leaf] = weight  # type: ignore[assignment]

    def gathered(self) -> Tensor:
        """Return what the module computes with. Collective over: the mesh of the shard."""
        return self.shard.redistribute(placements=self.placements).to_local()

    def rows_group(self) -> ProcessGroup | None:
        """Return the ranks whose rows, one after the other, are the weight; None for others."""
        mesh, placements = (
            self.shard.device_mesh,
            zip(self.shard.placements, self.placements, strict=True),
        )
        changed = [(axis, now) for axis, (now, then) in enumerate(placements) if now != then]
        if len(changed) == 1 and getattr(changed[0][1], "dim", None) == 0:
            return mesh.get_group(changed[0][0])
        return None


def gather_in_forward(model: nn.Module, late: list[LateWeight]) -> None:
    """Give each block its weights before its forward, and take them away after it."""
    units = {id(block): block for block in blocks(model)}
    inside = {name: module for name, module in model.named_modules() if id(module) in units}
    of_unit: dict[int, list[LateWeight]] = {}
    for one in late:
        unit = next((m for name, m in inside.items() if one.name.startswith(f"{name}.")), model)
        of_unit.setdefault(id(unit), []).append(one)
        units[id(unit)] = unit
    for key, weights in of_unit.items():
        _hook(units[key], weights)


def _hook(unit: nn.Module, weights: list[LateWeight]) -> None:
    together: dict[tuple[Any, ...], _Rows] = {}
    alone: list[list[LateWeight]] = []
    shards: dict[int, list[LateWeight]] = {}
    for one in weights:  # tied weights are one shard
        shards.setdefault(id(one.shard), []).append(one)
    for same in shards.values():
        group = same[0].rows_group()
        if group is None:
            alone.append(same)
        else:
            key = (id(group), same[0].shard.dtype)
            together.setdefault(key, _Rows(group, [])).weights.append(same)

    def take(*_: Any) -> None:
        for rows in together.values():
            rows.gather()
        for same in alone:
            whole = same[0].gathered()
            for one in same:
                one.set(whole)

    def give_back(*_: Any) -> None:
        for one in weights:
            one.set(one.room)

    unit.register_forward_pre_hook(take)
    unit.register_forward_hook(give_back, always_call=True)


@dataclass(slots=True)
class _Rows:
    """Weights of one type that are cut by rows over the same ranks: one call gathers all."""

    group: ProcessGroup
    weights: list[list[LateWeight]]

    def gather(self) -> None:
        """Give the modules their weights. Collective over: the group."""
        number = self.group.size()
        parts = [self._padded(same[0], number) for same in self.weights]
        sent = torch.cat(parts)
        every = sent.new_empty(number, len(sent))
        dist.all_gather(list(every), sent, self.group)
        pieces = torch.split_with_sizes(every, [len(part) for part in parts], dim=1)
        for same, part in zip(self.weights, pieces, strict=True):
            shape = same[0].shape
            whole = part.reshape(-1, *shape[1:])[: shape[0]]
            for one in same:
                one.set(whole)

    @staticmethod
    def _padded(one: LateWeight, number: int) -> Tensor:
        """Return this rank's rows, flat, and as many numbers as any rank has."""
        local = one.shard.to_local()
        most = -(-one.shape[0] // number) * one.shape[1:].numel()
        return pad(local.flatten(), (0, most - local.numel()))
