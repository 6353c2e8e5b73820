"""The loss of sharded logits, and tensors made whole (ranks)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from nbdist.train.parallelize.record import applied_to

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

__all__ = ["loss_context", "whole"]


@contextmanager
def loss_context(model: nn.Module) -> Iterator[None]:
    """Compute loss and backward of a model in here: cross-entropy then takes sharded logits."""
    applied = applied_to(model)
    if applied is None or not applied.loss_parallel:
        yield
        return
    context = loss_parallel()
    context.__enter__()
    try:
        yield
    finally:  # torch's own leaves its operators in place when an error passes through
        context.__exit__(None, None, None)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor without its shards: equal on all ranks of its mesh."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
