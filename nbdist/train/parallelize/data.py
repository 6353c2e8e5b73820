"""Data parallelism: DDP, FSDP2 as ZeRO 1 to 3, and HSDP where there are replicas (ranks)."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from nbdist.train.communication import CommunicationConfig, link_local_steps, register_hook
from nbdist.train.mesh import Axis, axis_size, data_parallel_mesh
from nbdist.train.parallelize.record import Strategy, applied_to

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "blocks",
    "check_strategy",
    "last_micro_batch",
    "recompute_blocks",
    "sharding_of",
    "spread_data",
]

_BUCKET_MEGABYTES = 25  # DDP's own default, named so that it can be found


class Sharding(TypedDict):
    """Arguments of `fully_shard`."""

    mesh: DeviceMesh
    reshard_after_forward: bool
    mp_policy: MixedPrecisionPolicy
    ignored_params: set[nn.Parameter]


def sharding_of(
    mesh: DeviceMesh, strategy: Strategy, param_dtype: torch.dtype | None
) -> Sharding | None:
    """Return how FSDP shards; None where one rank holds all. Collective over: the default group."""
    axes = data_parallel_mesh(mesh)
    if axes is None and param_dtype is None and mesh.size() > 1:
        return None
    return {
        "mesh": axes or mesh[Axis.DP_SHARD],
        "reshard_after_forward": strategy == "zero3",
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=torch.float32 if param_dtype else None
        ),
        "ignored_params": set(),
    }


def spread_data(
    model: nn.Module,
    mesh: DeviceMesh,
    sharding: Sharding | None,
    communication: CommunicationConfig | None = None,
) -> nn.Module:
    """Return the model with its data-parallel axes at work; without sharding, in DDP."""
    if sharding is None:
        axes = data_parallel_mesh(mesh)
        if communication and communication.local_steps and axes is not None:
            link_local_steps(model, _flat(axes).get_group(), communication)
            return model
        wrapped = _ddp(model, axes, communication)
        if communication and isinstance(wrapped, DistributedDataParallel):
            register_hook(wrapped, communication)
        return wrapped
    for module in (*blocks(model), model):  # inner first: the root takes what is left
        fully_shard(module, **sharding)
    if communication and communication.prefetch:
        _prefetch(blocks(model), communication.prefetch, on_cpu=mesh.device_type == "cpu")
    return model


def _prefetch(layers: list[nn.Module], ahead: int, *, on_cpu: bool) -> None:
    """Let every block gather the weights of the `ahead` next ones, in forward and backward."""
    sharded: list[FSDPModule] = [layer for layer in layers if isinstance(layer, FSDPModule)]
    for index, layer in enumerate(sharded):
        # without streams a gather that is not asynchronous holds its caller up
        layer._set_unshard_async_op(on_cpu)
        layer.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + ahead])
        before = sharded[max(index - ahead, 0) : index]
        layer.set_modules_to_backward_prefetch(before[::-1])


def recompute_blocks(model: nn.Module) -> None:
    """Let every block keep its inputs only, and compute the rest again in backward; in place."""
    for block in blocks(model):
        # an attribute of the block: a wrapper module would change the names of its weights
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _ddp(
    model: nn.Module, axes: DeviceMesh | None, communication: CommunicationConfig | None
) -> nn.Module:
    if axes is None:
        return model
    config = communication or CommunicationConfig()
    bucket = config.bucket_megabytes or _BUCKET_MEGABYTES
    if config.compression == "powersgd":  # its rounds would wait for each other on gloo's threads
        bucket = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20 + 1
    return DistributedDataParallel(
        model,
        process_group=_flat(axes).get_group(),
        bucket_cap_mb=bucket,
        gradient_as_bucket_view=True,
    )


def _flat(axes: DeviceMesh) -> DeviceMesh:
    return axes if axes.ndim == 1 else axes._flatten("ddp")


def check_strategy(
    strategy: Strategy,
    mesh: DeviceMesh,
    param_dtype: torch.dtype | None,
    communication: CommunicationConfig | None = None,
) -> None:
    """Refuse what a strategy cannot do, before any rank is touched."""
    if strategy not in ("ddp", "zero1", "zero2", "zero3"):
        raise ValueError(
            f'strategy={strategy!r} is unknown; set "ddp", "zero1", "zero2" or "zero3"'
        )
    if communication is not None:
        communication.check_strategy(strategy)
        _warn_if_unused(communication, mesh)
    if strategy != "ddp":
        return
    others = {a: n for a in (Axis.TP, Axis.PP, Axis.EP, Axis.CP) if (n := axis_size(mesh, a)) > 1}
    if others:
        named = ", ".join(f"{axis}={size}" for axis, size in others.items())
        raise ValueError(
            f'strategy="ddp" was asked for on a mesh with {named}: DDP knows whole weights only; '
            'leave strategy out and set dp_replicate for replicas, or use "zero1"'
        )
    if param_dtype is not None:
        raise ValueError(
            f'strategy="ddp" was asked for with param_dtype={param_dtype}: DDP computes in the '
            'weights\' own dtype; set TrainConfig(autocast_dtype=...), or strategy="zero1"'
        )


def _warn_if_unused(communication: CommunicationConfig, mesh: DeviceMesh) -> None:
    if communication == CommunicationConfig():
        return
    pp = axis_size(mesh, Axis.PP)
    if pp > 1:
        reason = f"the mesh has pp={pp}, where a stage gathers its weights by itself"
    elif all(axis_size(mesh, a) == 1 for a in (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.EP)):
        reason = "the mesh has one data-parallel rank, which exchanges no gradients"
    else:
        return
    warnings.warn(
        f"{communication} was given, but {reason}: it has no effect; leave communication out, or "
        "set dp_replicate or dp_shard",
        stacklevel=5,  # the caller of `parallelize`
    )


def last_micro_batch(model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
    """Return a context for one micro-batch: gradients are reduced over the ranks in the last only.

    With `strategy="zero2"` they are reduced in each: its ranks never hold whole gradients.
    """
    applied = applied_to(model)
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if is_last else model.no_sync()
    if isinstance(model, FSDPModule):
        strategy = applied.strategy if applied else "zero3"
        model.set_requires_gradient_sync(is_last or strategy == "zero2")
        if strategy != "zero3":  # the weights do not change between micro-batches
            model.set_reshard_after_backward(is_last)
    return nullcontext()


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a model: the members of its largest `ModuleList`."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    # `max` keeps the first of equals, and `modules` goes from the outside in
    largest = max(lists, key=lambda found: sum(p.numel() for p in found.parameters()), default=())
    containers = (nn.ModuleList, nn.ModuleDict)  # without forward: nothing to hook
    return [block for block in largest if not isinstance(block, containers)]
