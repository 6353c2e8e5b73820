"""The optimizer, the gradient clip and the pass over a validation split (ranks)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from nbdist.train.communication import LocalLink, OneBitAdamW, OneBitState, hook_state
from nbdist.train.empty import is_empty
from nbdist.train.parallelize import applied_to, loss_context, own_tokens, whole

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nbdist.train.config import LossFn, TrainConfig
    from nbdist.train.data import RankData

__all__ = ["build_optimizer", "clip_gradients", "gradient_norm", "validation_loss"]


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return AdamW over a model's weights; weight decay on those with two or more dimensions.

    For a model spread with `compression="onebit"` it is `OneBitAdamW`; with `local_steps` the
    steps are local.

    Raises:
        ValueError: 1-bit Adam or local steps with a float16 loss scale, on which the ranks could
            not agree, or local steps with what needs equal ranks after each step.
    """
    if is_empty(model):
        raise ValueError(
            "an optimizer was to be made for a model whose weights have no memory yet; fill it "
            "with load_pretrained(model, directory) before Trainer(model, ...)"
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # apart: one fused update takes either whole weights or parts of cut ones
    groups = [
        {
            "params": [
                p for p in trained if (p.dim() >= 2) == decays and isinstance(p, DTensor) == is_cut
            ],
            "weight_decay": config.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
        for is_cut in (True, False)
    ]
    filled = [group for group in groups if group["params"]]
    link = hook_state(model)
    if isinstance(link, OneBitState):
        if config.autocast_dtype == "float16":
            raise ValueError(
                'autocast_dtype="float16" was asked for with compression="onebit", whose ranks see '
                'infinity in their own gradients only; set "bfloat16" or another compression'
            )
        return OneBitAdamW(filled, link, lr=config.learning_rate, betas=config.betas)
    optimizer = torch.optim.AdamW(
        filled,
        lr=config.learning_rate,
        betas=config.betas,
        fused=True,
    )
    if isinstance(link, LocalLink):
        _check_local(link, config)
        link.attach(optimizer)
    return optimizer


def _check_local(link: LocalLink, config: TrainConfig) -> None:
    asked = f"local_steps={link.every} was asked for with"
    if config.autocast_dtype == "float16":
        raise ValueError(
            f'{asked} autocast_dtype="float16", whose ranks see infinity in their own gradients '
            'only and would leave out different steps; set "bfloat16"'
        )
    if config.checkpoint is not None or config.on_failure == "heal":
        raise ValueError(
            f"{asked} checkpoint={config.checkpoint} and on_failure={config.on_failure!r}, but a "
            "rank's weights and AdamW state are its own between meetings; leave both out, and "
            "save each rank's state_dict in a file of its own"
        )
    if config.num_steps % link.every:
        raise ValueError(
            f"{asked} num_steps={config.num_steps}: the run would end between two meetings, with "
            f"different weights on the ranks; set num_steps to a multiple of {link.every}"
        )


def clip_gradients(
    parameters: list[nn.Parameter],
    clip_norm: float,
    *,
    scale: float = 1.0,
    pipeline: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale gradients to a norm of at most `clip_norm`; return the norm they had, a scalar.

    They are divided by `scale` first. Collective over: the meshes of the parameters, and the ranks
    of their pipeline. The norm is of the whole gradient, over all shards; weights that lie on the
    ranks in different ways are added up one way at a time.
    """
    if scale != 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1 / scale)
    norm = gradient_norm(parameters)
    if pipeline is not None:
        squared = norm.square()
        dist.all_reduce(squared, group=pipeline)
        norm = squared.sqrt()
    for same in _by_layout(parameters).values():
        clip_grads_with_norm_(same, clip_norm, norm)
    return norm


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the norm of the whole gradient, a scalar. Collective over: the parameters' meshes."""
    norms = []
    for same in _by_layout(parameters).values():
        norm = get_total_norm([p.grad for p in same if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _by_layout(parameters: list[nn.Parameter]) -> dict[object, list[nn.Parameter]]:
    layouts: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
            layouts.setdefault(key, []).append(parameter)
    return layouts


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
            loss = _loss_of(model, inputs, targets, loss_fn)
            sums.append(torch.stack((loss * len(inputs), torch.full_like(loss, len(inputs)))))
    finally:
        model.train()
    total = torch.stack(sums).sum(0)
    dist.all_reduce(total)
    loss_sum, num_rows = total.tolist()
    return float(loss_sum / num_rows)


def _loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, loss_fn: LossFn) -> Tensor:
    applied = applied_to(model)
    pipeline = applied.pipeline if applied else None
    with loss_context(model):
        if pipeline is None:
            return whole(loss_fn(model(inputs), own_tokens(model, targets)))
        output = pipeline.forward(inputs)
        loss = whole(loss_fn(output, targets)) if output is not None else None
    ranks = dist.get_process_group_ranks(pipeline.group)
    sent = [None if loss is None else float(loss)]
    dist.broadcast_object_list(sent, ranks[pipeline.last_place], pipeline.group)
    assert sent[0] is not None, "the last stage has a loss"
    return torch.tensor(sent[0], device=inputs.device, dtype=torch.float64)
