"""What was done to a model: the trainer and a second `parallelize` read it here (ranks)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh

    from nbdist.train.parallelize.pipeline import Pipeline
    from nbdist.train.parallelize.skeleton import Skeleton

__all__ = ["Again", "Applied", "Strategy", "applied_to", "bare", "remember"]

Strategy = Literal["ddp", "zero1", "zero2", "zero3"]
"""What data-parallel ranks keep whole between steps; see `parallelize`."""


@dataclass(frozen=True, slots=True)
class Again:
    """With what a new model can be spread as one was.

    Attributes:
        skeleton: the whole model without its weights.
        options: of `parallelize`.
    """

    skeleton: Skeleton
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Applied:
    """How a model lies on the ranks.

    Attributes:
        mesh: the whole mesh.
        strategy: of the data-parallel axes.
        loss_parallel: the model returns logits whose vocabulary is sharded.
        tensor_plan: style of each module that `tp` shards, by name.
        pipeline: this rank's stages, where the model is cut over `pp`.
        again: how to do it once more.
    """

    mesh: DeviceMesh
    strategy: Strategy
    loss_parallel: bool = False
    tensor_plan: dict[str, str] | None = None
    pipeline: Pipeline | None = None
    again: Again | None = None


# not an attribute of the module: copies and state dicts of a model must not carry it
_applied: WeakKeyDictionary[nn.Module, Applied] = WeakKeyDictionary()


def applied_to(model: nn.Module) -> Applied | None:
    """Return what `parallelize` did to a model; None if it did nothing."""
    return _applied.get(model)


def remember(model: nn.Module, applied: Applied) -> None:
    """Note what was done to a model."""
    _applied[model] = applied


def bare(model: nn.Module) -> nn.Module:
    """Return the user's own module, without DDP around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model
