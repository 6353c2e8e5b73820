"""The mesh: which axis each rank stands on (ranks); all mesh arithmetic is here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from nbdist.errors import NoWorldError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Axis", "MeshConfig", "build_mesh", "data_parallel_mesh", "data_parallel_place"]


class Axis(StrEnum):
    """Names of the mesh axes, slowest link first: neighbours on the last axis talk most."""

    DP_REPLICATE = "dp_replicate"
    """Ranks with the same shard; gradients are averaged over it."""
    DP_SHARD = "dp_shard"
    """Ranks that together hold one replica (FSDP)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """Number of ranks on each axis. One axis may be -1: it takes what the others leave.

    Attributes:
        dp_replicate: replicas of the model.
        dp_shard: ranks that share one replica.
    """

    dp_replicate: int = 1
    dp_shard: int = -1

    def __post_init__(self) -> None:
        given = {str(axis): getattr(self, axis) for axis in Axis}
        if any(degree < 1 and degree != -1 for degree in given.values()):
            raise ValueError(f"mesh degrees {given} are not all >= 1; set -1 for the rest")
        if list(given.values()).count(-1) > 1:
            raise ValueError(f"mesh degrees {given} have more than one -1; set all but one")

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
    if not dist.is_initialized():
        raise NoWorldError(
            "`build_mesh` was called without a default process group; call it inside a "
            "%%distributed cell, or call torch.distributed.init_process_group first"
        )
    degrees = (config or MeshConfig()).degrees(dist.get_world_size())
    on_gpu = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
    return init_device_mesh(
        "cuda" if on_gpu else "cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees)
    )


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a mesh that FSDP needs: without `dp_replicate` where that is 1.

    An axis of size 1 would cost a collective a step.
    """
    if mesh[Axis.DP_REPLICATE].size() == 1:
        return mesh[Axis.DP_SHARD]
    return mesh[Axis.DP_REPLICATE, Axis.DP_SHARD]


def data_parallel_place(mesh: DeviceMesh) -> tuple[int, int]:
    """Return this rank's place among the ranks that see different rows, and their number."""
    replica, num_replicas = mesh.get_local_rank(Axis.DP_REPLICATE), mesh[Axis.DP_REPLICATE].size()
    shard, num_shards = mesh.get_local_rank(Axis.DP_SHARD), mesh[Axis.DP_SHARD].size()
    return replica * num_shards + shard, num_replicas * num_shards
