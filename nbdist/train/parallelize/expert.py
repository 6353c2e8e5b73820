"""Expert parallelism: each rank of `ep` holds some of every layer's experts (ranks)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from nbdist.train.mesh import Axis, axis_rank, axis_size, data_parallel_mesh
from nbdist.train.models.moe import Experts, MixtureOfExperts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from nbdist.train.parallelize.data import Sharding

__all__ = ["check_experts", "spread_experts"]


def check_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse experts that a mesh cannot hold; touches nothing.

    Raises:
        ValueError: no experts, or a number that `ep` does not divide; a balance loss with `pp`.
    """
    ep, pp = axis_size(mesh, Axis.EP), axis_size(mesh, Axis.PP)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, MixtureOfExperts)}
    if ep > 1 and not layers:
        raise ValueError(
            f"ep={ep} was asked for, but {type(model).__name__} has no MixtureOfExperts layer; "
            "build it with DecoderConfig(num_experts=...), or set ep=1 and dp_shard instead"
        )
    for name, layer in layers.items():
        if layer.num_experts % ep:
            raise ValueError(
                f"`{name}` has {layer.num_experts} experts, which ep={ep} does not divide; set ep "
                f"to a divisor of {layer.num_experts}"
            )
        if pp > 1 and layer.balance_weight:
            raise ValueError(
                f"`{name}` has balance_weight={layer.balance_weight}, but with pp={pp} only the "
                "last stage has a loss to add it to; set balance_weight=0 or pp=1"
            )


def spread_experts(model: nn.Module, mesh: DeviceMesh, sharding: Sharding | None) -> None:
    """Leave a rank its own experts, in place.

    Collective over: the default group.

    Args:
        model: whole, equal on all ranks.
        mesh: the whole mesh.
        sharding: of the other weights; experts are sharded over its axes without `ep`, or added to
            the weights that it ignores.
    """
    ep, place = axis_size(mesh, Axis.EP), axis_rank(mesh, Axis.EP)
    layers = [m for m in model.modules() if isinstance(m, Experts)]
    if ep == 1 or not layers:
        return
    axes = data_parallel_mesh(mesh, expert=True)
    for experts in layers:
        experts.group = mesh[Axis.EP].get_group()
        for name, parameter in list(experts.named_parameters()):
            mine = parameter.detach().chunk(ep)[place].clone()
            cut = DTensor.from_local(mine, mesh[Axis.EP], [Shard(0)], run_check=False)
            experts.register_parameter(name, nn.Parameter(cut))
        if sharding is None:
            continue
        if axes is None:
            sharding["ignored_params"] |= set(experts.parameters())
        else:  # dim 1: dim 0 is that of the experts
            own: Sharding = {**sharding, "mesh": axes}
            fully_shard(experts, shard_placement_fn=lambda _: Shard(1), **own)
