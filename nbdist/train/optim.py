"""The optimizer, the gradient clip and the pass over a validation split (ranks)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nbdist.train.config import LossFn, TrainConfig
    from nbdist.train.data import RankData

__all__ = ["build_optimizer", "clip_gradients", "validation_loss"]


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW over a model's weights; weight decay on those with two or more dimensions."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        fused=True,
    )


def clip_gradients(parameters: list[nn.Parameter], clip_norm: float) -> Tensor:
    """Scale gradients to a norm of at most `clip_norm`; return the norm they had, a scalar.

    Collective over: the mesh of the parameters. The norm is of the whole gradient, over all
    shards. It is summed once, where `clip_grad_norm_` of sharded weights sums it twice.
    """
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    clip_grads_with_norm_(parameters, clip_norm, norm)
    return norm


@torch.no_grad()
def validation_loss(
    model: nn.Module, data: RankData, loss_fn: LossFn, device: torch.device
) -> float:
    """Return the mean loss over all rows of the validation split. Collective over: all ranks.

    Raises:
        ValueError: the data has no validation split.
    """
    if data.num_validation_batches == 0:
        raise ValueError(
            "a validation loss was asked of data without a validation split; build it with "
            "validation_fraction > 0, or set eval_every=None"
        )
    sums = []  # of losses and of rows, a batch each
    model.eval()
    try:
        for index in range(data.num_validation_batches):
            inputs, targets = (part.to(device) for part in data.validation_batch(index))
            loss = loss_fn(model(inputs), targets)
            sums.append(torch.stack((loss * len(inputs), torch.full_like(loss, len(inputs)))))
    finally:
        model.train()
    total = torch.stack(sums).sum(0)
    dist.all_reduce(total)
    loss_sum, num_rows = total.tolist()
    return float(loss_sum / num_rows)
