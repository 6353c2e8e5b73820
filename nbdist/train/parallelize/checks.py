"""What every rank must agree on before a model is spread (ranks)."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

__all__ = ["check_equal_on_ranks", "check_materialized", "copy_from_rank_zero"]


def check_materialized(model: nn.Module) -> None:
    """Refuse a model that was built on the meta device."""
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        raise ValueError(
            f"{type(model).__name__} has {len(on_meta)} parameters without memory (first: "
            f"`{on_meta[0]}`): it was built on the meta device; call model.to_empty(device=...) "
            "and model.reset_parameters() first"
        )


def check_equal_on_ranks(model: nn.Module) -> None:
    """Refuse different models. Collective over: the default group."""
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


def copy_from_rank_zero(model: nn.Module) -> None:
    """Give all ranks rank 0's weights and buffers. Collective over: the default group."""
    tensors = [*model.parameters(), *model.buffers()]
    pending = [dist.broadcast(tensor.detach(), 0, async_op=True) for tensor in tensors]
    for work in pending:
        if work is not None:
            work.wait()
