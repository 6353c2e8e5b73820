"""A served model made of the shards that training holds: nothing is kept twice (ranks).

What tensor parallelism cuts stays cut. What FSDP cuts is gathered where it is needed, one block at
a time, and let go after it, over process groups of its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from nbdist.errors import ServeError
from nbdist.serve.cut import cut_empty
from nbdist.serve.gathering import LateWeight, gather_in_forward
from nbdist.serve.resident import bare_model, empty_model, fill, named_weights
from nbdist.serve.wire import own_group
from nbdist.train.mesh import Axis, axis_size
from nbdist.train.parallelize.record import applied_to

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor.placement_types import Placement

    from nbdist.serve.cut import Cut

__all__ = ["shared_shards", "sharing_ranks"]


def sharing_ranks(model: nn.Module) -> list[int]:
    """Return the ranks that together hold the model that this rank has a part of.

    Raises:
        ServeError: its parts cannot be served.
    """
    applied = applied_to(model)
    cut = [axis for axis in (Axis.PP, Axis.EP) if applied and axis_size(applied.mesh, axis) > 1]
    if cut:
        raise ServeError(
            f"share=True was asked for a model that is cut over {', '.join(cut)}, whose ranks hold "
            "different layers or experts; leave share out to serve a copy, where one fits"
        )
    found, sizes = {dist.get_rank()} if dist.is_initialized() else {0}, {}
    for _, tensor in named_weights(bare_model(model)):
        if isinstance(tensor, DTensor):
            axes = _cut_axes(tensor)
            mesh = tensor.device_mesh
            for axis in axes:
                sizes[tuple(dist.get_process_group_ranks(mesh.get_group(axis)))] = mesh.size(axis)
            found |= set(_ranks_over(mesh, axes))
    if len(found) != math.prod(sizes.values()):
        raise ServeError(
            f"share=True was asked for a model whose weights are cut over {list(sizes)}, and no "
            "weight over all of these; leave share out to serve a copy"
        )
    return sorted(found)


def shared_shards(model: nn.Module) -> nn.Module:
    """Return an eval model that computes with the very shards of `model`.

    Collective over: the ranks of `sharing_ranks`. Hooks, training mode and process groups of
    `model` are not used. It computes in the weights' own type, whatever `param_dtype` says.

    Args:
        model: FSDP2, tensor parallelism or both may be on it; otherwise as in `resident_copy`.

    Raises:
        ServeError: a view cannot be built from the model's config and weights.
    """
    named = named_weights(bare_model(model))
    applied = applied_to(model)
    groups: dict[tuple[int, ...], ProcessGroup] = {}
    cut = None
    if applied is not None and applied.tensor_plan:
        ranks = dist.get_process_group_ranks(applied.mesh[Axis.TP].get_group())
        empty, cut = cut_empty(model, ranks)
        groups[tuple(ranks)] = cut.group
    else:
        empty = empty_model(bare_model(model))
    made: dict[int, Tensor] = {}
    weights: dict[str, Tensor] = {}
    late: list[LateWeight] = []
    for name, tensor in named:
        if id(tensor) not in made:
            made[id(tensor)] = _same_shard(tensor, groups)
        shard = made[id(tensor)]
        if isinstance(shard, DTensor) and not _lies_right(name, shard, cut):
            late.append(LateWeight.of(empty, name, shard, _wanted(name, shard, cut)))
        else:
            weights[name] = shard.to_local() if isinstance(shard, DTensor) else shard
    filled = fill(empty, weights)
    gather_in_forward(filled, late)
    return filled


def _wanted(name: str, shard: DTensor, cut: Cut | None) -> tuple[Placement, ...]:
    """Return how a weight lies for computing, on the mesh of its shard."""
    wanted: list[Placement] = [Replicate()] * shard.device_mesh.ndim
    if cut is not None and name in cut.dimensions:
        tp_axis = shard.device_mesh.get_all_groups().index(cut.group)
        wanted[tp_axis] = Shard(cut.dimensions[name])
    return tuple(wanted)


def _lies_right(name: str, shard: DTensor, cut: Cut | None) -> bool:
    return tuple(shard.placements) == _wanted(name, shard, cut)


def _cut_axes(tensor: DTensor) -> list[int]:
    return [axis for axis, placed in enumerate(tensor.placements) if not placed.is_replicate()]


def _ranks_over(mesh: DeviceMesh, axes: list[int]) -> list[int]:
    """Return the ranks that differ from this one on these axes only."""
    where: Any = mesh.get_coordinate() or ()
    index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(where))
    return [int(rank) for rank in mesh.mesh[index].flatten().tolist()]


def _same_shard(tensor: Tensor, groups: dict[tuple[int, ...], ProcessGroup]) -> Tensor:
    """Return a tensor of the same memory, on a mesh whose groups are not training's."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    local, axes, mesh = tensor._local_tensor.detach(), _cut_axes(tensor), tensor.device_mesh
    if not axes:
        return local
    own = []
    for axis in axes:
        ranks = dist.get_process_group_ranks(mesh.get_group(axis))
        if tuple(ranks) not in groups:
            groups[tuple(ranks)] = own_group(ranks)
        own.append(groups[tuple(ranks)])
    names = tuple(f"serve_{(mesh.mesh_dim_names or range(mesh.ndim))[axis]}" for axis in axes)
    shape = [mesh.size(axis) for axis in axes]
    over = torch.tensor(_ranks_over(mesh, axes), dtype=torch.int).view(shape)
    mesh = DeviceMesh.from_group(
        own[0] if len(own) == 1 else own, mesh.device_type, over, mesh_dim_names=names
    )
    placements = [tensor.placements[axis] for axis in axes]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
