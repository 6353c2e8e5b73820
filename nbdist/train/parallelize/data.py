"""Data parallelism with sharded weights: FSDP2, and HSDP where there are replicas (ranks)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from nbdist.train.mesh import data_parallel_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["parallelize"]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Shard a model's weights, gradients and optimizer state. Collective over: all ranks.

    Any module works: the blocks of its largest `ModuleList` become one group of weights each,
    the rest is one more. All ranks start from rank 0's weights. A model that is sharded already
    is returned as it is.

    Args:
        model: the whole model, equally built on every rank; it is changed in place.
        mesh: from `build_mesh`.
        param_dtype: dtype of forward and backward, such as `torch.bfloat16`; the weights that
            the optimizer changes, and gradient sums, keep theirs.
        reshard_after_forward: free gathered weights between forward and backward; False spends
            memory to save a collective a block.

    Raises:
        ValueError: the ranks built different models, or a model without memory (meta device).
    """
    if isinstance(model, FSDPModule):
        return model
    _check_materialized(model)
    model.to(mesh.device_type)
    _check_equal_on_ranks(model)
    _copy_from_rank_zero(model)
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=torch.float32 if param_dtype else None
    )
    axes = data_parallel_mesh(mesh)
    for module in (*_blocks(model), model):  # inner first: the root takes what is left
        fully_shard(
            module, mesh=axes, reshard_after_forward=reshard_after_forward, mp_policy=policy
        )
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    # `max` keeps the first of equals, and `modules` goes from the outside in
    largest = max(lists, key=lambda found: sum(p.numel() for p in found.parameters()), default=())
    containers = (nn.ModuleList, nn.ModuleDict)  # without forward: nothing to hook
    return [block for block in largest if not isinstance(block, containers)]


def _check_materialized(model: nn.Module) -> None:
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        raise ValueError(
            f"{type(model).__name__} has {len(on_meta)} parameters without memory (first: "
            f"`{on_meta[0]}`): it was built on the meta device; call model.to_empty(device=...) "
            "and model.reset_parameters() first"
        )


def _check_equal_on_ranks(model: nn.Module) -> None:
    mine = [(name, tuple(t.shape), str(t.dtype)) for name, t in model.state_dict().items()]
    everyone: list[list[tuple[str, tuple[int, ...], str]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        first = next((a for a, b in zip(theirs, everyone[0], strict=False) if a != b), None)
        raise ValueError(
            f"ranks built different models: rank 0 has {len(everyone[0])} tensors, rank {rank} "
            f"has {len(theirs)}; first difference on rank {rank}: {first}; build the model from "
            "the same configuration on every rank"
        )


def _copy_from_rank_zero(model: nn.Module) -> None:
    tensors = [*model.parameters(), *model.buffers()]
    pending = [dist.broadcast(tensor.detach(), 0, async_op=True) for tensor in tensors]
    for work in pending:
        if work is not None:
            work.wait()
