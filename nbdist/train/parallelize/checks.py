"""What every rank must agree on before a model is spread (ranks)."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from nbdist.train.empty import is_empty

__all__ = ["agree", "check_materialized", "move"]


def check_materialized(model: nn.Module, *, may_be_empty: bool) -> None:
    """Refuse a model without memory that nobody could fill.

    Args:
        model: whole.
        may_be_empty: the way it is spread lets `load_pretrained` fill it afterwards.
    """
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if not on_meta and not buffers:
        return
    if buffers or not is_empty(model):
        raise ValueError(
            f"{type(model).__name__} has {len(on_meta) + len(buffers)} tensors without memory "
            f"(first: `{(on_meta + buffers)[0]}`): it was built on the meta device; build it with "
            "memory, or inside `with empty_weights():` and fill it with load_pretrained"
        )
    if not may_be_empty:
        raise ValueError(
            f"{type(model).__name__} was built inside empty_weights(), but DDP and pipelines need "
            "whole weights here; build it with memory, or shard it: strategy='zero3', or tp"
        )


def move(model: nn.Module, device_type: str) -> None:
    """Move a model to this rank's device; weights without memory stay without."""
    if is_empty(model):
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device_type)
    else:
        model.to(device_type)


def agree(model: nn.Module) -> None:
    """Refuse different models, then give all ranks rank 0's weights and buffers.

    Collective over: the default group.
    """
    _check_equal_on_ranks(model)
    _copy_from_rank_zero(model)


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
    tensors = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
    pending = [dist.broadcast(tensor.detach(), 0, async_op=True) for tensor in tensors]
    for work in pending:
        if work is not None:
            work.wait()
