"""The mesh: which axis each rank stands on (ranks); all mesh arithmetic is here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nbdist.errors import NoWorldError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "DATA_AXES",
    "Axis",
    "MeshConfig",
    "axis_rank",
    "axis_size",
    "build_mesh",
    "data_parallel_mesh",
    "data_parallel_place",
    "degrees_of",
    "num_fixed",
    "resized_degrees",
]


class Axis(StrEnum):
    """Names of the mesh axes, slowest link first: neighbours on the last axis talk most."""

    PP = "pp"
    """Ranks that hold layers one after another (pipeline)."""
    DP_REPLICATE = "dp_replicate"
    """Ranks with the same shard; gradients are averaged over it."""
    DP_SHARD = "dp_shard"
    """Ranks that together hold one replica (FSDP)."""
    CP = "cp"
    """Ranks that hold parts of the same rows' tokens (context parallel)."""
    EP = "ep"
    """Ranks that hold different experts; each sees rows of its own, as on `dp_shard`."""
    TP = "tp"
    """Ranks that hold parts of the same layers (tensor parallel)."""


DATA_AXES = (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.EP)
"""Ranks that differ on these see different rows."""

_CHANGING = (Axis.DP_REPLICATE, Axis.DP_SHARD)
"""Their sizes follow the number of ranks while a run goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """Number of ranks on each axis. One axis may be -1: it takes what the others leave.

    The degrees multiply to the number of ranks. Rows of a batch are dealt over `dp_replicate`,
    `dp_shard` and `ep`; ranks that differ on `cp`, `tp` or `pp` only see the same rows.

    Attributes:
        dp_replicate: replicas of the model.
        dp_shard: ranks that share one replica.
        tp: ranks that share each large layer.
        pp: groups of layers, one after another.
        cp: ranks that share the tokens of a row.
        ep: ranks that share the experts of a mixture-of-experts layer.
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        given = {str(axis): getattr(self, axis) for axis in Axis}
        if any(degree < 1 and degree != -1 for degree in given.values()):
            raise ValueError(f"mesh degrees {given} are not all >= 1; set -1 for the rest")
        if list(given.values()).count(-1) > 1:
            raise ValueError(f"mesh degrees {given} have more than one -1; set all but one")

    @classmethod
    def auto(cls, model: nn.Module, sample: Tensor | None = None) -> MeshConfig:
        """Return the mesh that talks least among those that fit; it shows why. Not collective.

        Memory: what is free on this rank's GPU, or this host's divided by its ranks; a tenth is
        left alone. Equal on all ranks only if they have equal memory: choose on one and push it.

        Args:
            model: whole.
            sample: inputs of one rank's micro-batch, to count activations.

        Raises:
            NoWorldError: this process has no default process group.
            ValueError: none fits; the text lists those looked at.
        """
        from nbdist.train.plan import choose_mesh, free_bytes

        _require_group("MeshConfig.auto")
        return choose_mesh(
            model,
            world_size=dist.get_world_size(),
            device_bytes=int(0.9 * free_bytes()),
            sample=sample,
        )

    def degrees(self, world_size: int) -> dict[str, int]:
        """Return the number of ranks of each axis, in mesh order.

        Raises:
            ValueError: they do not multiply to `world_size`; the text is the whole equation.
        """
        given: dict[str, int] = {str(axis): getattr(self, axis) for axis in Axis}
        known = math.prod(degree for degree in given.values() if degree != -1)
        open_axis = next((axis for axis, degree in given.items() if degree == -1), None)
        if open_axis is not None and world_size % known == 0:
            return given | {open_axis: world_size // known}
        if known == world_size:
            return given
        terms = " * ".join(f"{axis}={degree}" for axis, degree in given.items())
        needed = "a multiple of " * (open_axis is not None) + str(known)
        rest = math.prod(degree for axis, degree in given.items() if axis != Axis.DP_SHARD)
        fit = f"set dp_shard={world_size // rest} or " if world_size % rest == 0 else ""
        total = f" = {known}" if open_axis is None else ""
        raise ValueError(
            f"mesh degrees do not cover the world: {terms}{total}, but world_size={world_size}; "
            f"{fit}start {needed} ranks"
        )


def build_mesh(config: MeshConfig | None = None) -> DeviceMesh:
    """Return the mesh of all ranks. Collective over: the default group.

    Every axis is there, those of size 1 too, so code can always name them.

    Raises:
        NoWorldError: this process has no default process group.
        ValueError: the degrees do not multiply to the world size.
    """
    _require_group("build_mesh")
    degrees = (config or MeshConfig()).degrees(dist.get_world_size())
    on_gpu = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
    return init_device_mesh(
        "cuda" if on_gpu else "cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees)
    )


def _require_group(name: str) -> None:
    if not dist.is_initialized():
        raise NoWorldError(
            f"`{name}` was called without a default process group; call it inside a "
            "%%distributed cell, or call torch.distributed.init_process_group first"
        )


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """Return the number of ranks on an axis; 1 when the mesh has no such axis."""
    return mesh[axis].size() if axis in (mesh.mesh_dim_names or ()) else 1


def axis_rank(mesh: DeviceMesh, axis: str) -> int:
    """Return this rank's place on an axis; 0 when the mesh has no such axis."""
    names, where = mesh.mesh_dim_names or (), mesh.get_coordinate()
    # not of the axis's group: that may be gone
    return where[names.index(axis)] if where and axis in names else 0


def degrees_of(mesh: DeviceMesh) -> dict[str, int]:
    """Return the number of ranks of each axis that has more than one."""
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
    return {axis: size for axis, size in sizes if size > 1}


def num_fixed(mesh: DeviceMesh) -> int:
    """Return what the number of ranks must be a multiple of, whatever `resized_degrees` changes."""
    sizes = zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)
    return math.prod(size for axis, size in sizes if axis not in _CHANGING)


def resized_degrees(degrees: dict[str, int], world_size: int) -> dict[str, int]:
    """Return the degrees of a mesh on another number of ranks.

    The data-parallel axes change: `dp_replicate` if the mesh replicates and whole replicas are
    left, else `dp_shard`, and then nothing is replicated.

    Raises:
        ValueError: the other axes do not divide `world_size`; the text is the whole equation.
    """
    fixed = {axis: size for axis, size in degrees.items() if axis not in _CHANGING}
    left, rest = divmod(world_size, math.prod(fixed.values()))
    if rest or not left:
        terms = " * ".join(f"{axis}={size}" for axis, size in fixed.items() if size > 1)
        number = math.prod(fixed.values())
        raise ValueError(
            f"mesh degrees do not cover the world: {terms} = {number} cannot change while a run "
            f"goes on, but world_size={world_size}; ask for a multiple of {number} ranks"
        )
    shard = degrees.get(Axis.DP_SHARD, 1)
    if degrees.get(Axis.DP_REPLICATE, 1) > 1 and left % shard == 0:
        return degrees | {Axis.DP_REPLICATE: left // shard}
    single = {Axis.DP_REPLICATE: 1} if Axis.DP_REPLICATE in degrees else {}
    return degrees | {Axis.DP_SHARD: left} | single


def data_parallel_mesh(mesh: DeviceMesh, *, expert: bool = False) -> DeviceMesh | None:
    """Return the part of a mesh over which weights are sharded and gradients averaged.

    Its last axis shards; an axis before it replicates. Axes of size 1 are left out: each would
    cost a collective a step. None when one rank is left. Collective over: the default group.

    Args:
        mesh: from `build_mesh`.
        expert: for the weights of experts, which differ along `ep`.
    """
    shards = tuple(
        str(axis)
        for axis in (Axis.DP_SHARD, Axis.CP, Axis.EP)
        if axis_size(mesh, axis) > 1 and not (expert and axis is Axis.EP)
    )
    replicated = axis_size(mesh, Axis.DP_REPLICATE) > 1
    if not shards and not replicated:
        return None
    if len(shards) > 1:
        shard = _flattened(mesh, shards)
    else:
        shard = mesh[shards[0] if shards else Axis.DP_SHARD]
    if not replicated:
        return shard
    return DeviceMesh._concatenate([mesh[Axis.DP_REPLICATE], shard])


def _flattened(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    return mesh[axes]._flatten("_".join(axes))


def data_parallel_place(mesh: DeviceMesh) -> tuple[int, int]:
    """Return this rank's place among the ranks that see different rows, and their number."""
    place, number = 0, 1
    for axis in DATA_AXES:
        size = axis_size(mesh, axis)
        place, number = place * size + axis_rank(mesh, axis), number * size
    return place, number
