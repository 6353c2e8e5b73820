"""Compare training on a mesh with one plain process, step by step, gradient by gradient (ranks).

In float64, sums taken in another order differ by 1e-16 of their terms, and Adam's division by a
small root raises that over the steps: what is left above 1e-11 is an error of the algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbdist.train.mesh import build_mesh
from nbdist.train.models import auxiliary_loss
from nbdist.train.parallelize import bare, parallelize, whole
from nbdist.train.trainer import Trainer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nbdist.train.config import TrainConfig
    from nbdist.train.data import TrainData
    from nbdist.train.mesh import MeshConfig

__all__ = ["Parity", "Trace", "compare", "trace_one_process"]


@dataclass(slots=True)
class Trace:
    """What a run did: the loss, the gradient norm and the clipped gradients of every step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Largest absolute differences between a mesh and one process, over all steps and ranks.

    Attributes:
        loss: of the mean loss of the global batch.
        norm: of the norm of the whole gradient.
        gradient: of any element of any clipped gradient.
        worst: name of the weight with that difference.
        num_steps: steps compared.
    """

    loss: float
    norm: float
    gradient: float
    worst: str
    num_steps: int


def trace_one_process(model: nn.Module, data: TrainData, config: TrainConfig) -> Trace:
    """Train in a plain loop that knows no mesh and no trainer; not collective.

    Args:
        model: in float64, changed in place.
        data: whole.
        config: how to train.
    """
    rows = data.for_rank(global_batch_size=config.global_batch_size, rank=0, world_size=1)
    named = dict(model.named_parameters())
    decayed = [p for p in named.values() if p.dim() >= 2]
    plain = [p for p in named.values() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ],
        betas=config.betas,
    )
    trace = Trace()
    for step in range(config.num_steps):
        inputs, targets = rows.batch(step)
        loss = config.loss_fn(model(inputs), targets)
        extra = auxiliary_loss(model)
        (loss if extra is None else loss + extra).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(named.values(), config.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate_at(step)
        trace.losses.append(float(loss.detach()))
        trace.norms.append(float(norm))
        trace.gradients.append({n: p.grad.clone() for n, p in named.items() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return trace


def compare(
    expected: Trace,
    model: nn.Module,
    data: TrainData,
    config: TrainConfig,
    mesh: MeshConfig,
    **options: Any,
) -> Parity:
    """Train on a mesh and compare every step with `expected`. Collective over: all ranks.

    Args:
        expected: from `trace_one_process`, with equal weights, data and configuration.
        model: whole, on every rank; changed in place.
        data: whole, on every rank.
        config: how to train.
        mesh: of all ranks.
        options: of `parallelize`.

    Raises:
        ValueError: a weight of the one process had a gradient, and on the mesh no rank has it.
    """
    trainer = Trainer(parallelize(model, build_mesh(mesh), **options), data, config)
    differences: list[dict[str, float]] = []

    def look(*_: Any) -> None:
        wanted = expected.gradients[len(differences)]
        found = _gradients(trainer.model)
        differences.append({n: float((found[n] - wanted[n]).abs().max()) for n in found})

    hook = trainer.optimizer.register_step_pre_hook(look)
    try:
        history = trainer.fit()
    finally:
        hook.remove()
    everyone: list[dict[str, float]] = [{}] * dist.get_world_size()
    mine = {name: max(step[name] for step in differences) for name in differences[0]}
    dist.all_gather_object(everyone, mine)
    _check_complete(expected, everyone)
    gradient, worst = max((v, n) for one in everyone for n, v in one.items())
    norms = [record.grad_norm for record in history.records]
    return Parity(
        loss=_largest(history.losses, expected.losses),
        norm=_largest(norms, expected.norms),
        gradient=gradient,
        worst=worst,
        num_steps=len(history),
    )


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    named = bare(model).named_parameters()
    return {name: whole(p.grad).clone() for name, p in named if p.grad is not None}


def _check_complete(expected: Trace, everyone: list[dict[str, float]]) -> None:
    missing = set(expected.gradients[0]).difference(*everyone)
    if missing:
        raise ValueError(
            f"{len(missing)} weights have a gradient in one process and on no rank of the mesh: "
            f"{sorted(missing)[:3]}; compare equal models"
        )


def _largest(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True))
