"""Communication hooks of DDP: plain, fp16, PowerSGD and the one of 1-bit Adam (ranks)."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from nbdist.train.communication.local import LocalLink

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from nbdist.train.communication.config import CommunicationConfig
    from nbdist.train.communication.onebit import OneBitAdamW

__all__ = ["OneBitState", "hook_state", "link_local_steps", "register_hook"]

_states: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()


class OneBitState:
    """Links DDP's hook with the optimizer: it reduces gradients until momentum is sent instead.

    Attributes:
        group: the data-parallel ranks.
        warmup_steps: steps that reduce gradients.
        optimizer: set by `OneBitAdamW`; without one, gradients are reduced.
    """

    def __init__(self, group: dist.ProcessGroup, warmup_steps: int) -> None:
        self.group = group
        self.warmup_steps = warmup_steps
        self.optimizer: OneBitAdamW | None = None

    @property
    def compressing(self) -> bool:
        """Whether the next step sends momentum: its gradients stay those of one rank."""
        return self.optimizer is not None and self.optimizer.compressing


def register_hook(model: DistributedDataParallel, config: CommunicationConfig) -> None:
    """Give a DDP its hook; not collective.

    A hook calls `torch.distributed` by name: the check of collectives and `WireCounter` see it.
    """
    group = model.process_group
    if config.compression == "onebit":
        state = _states[model] = OneBitState(group, config.warmup_steps)
        model.register_comm_hook(state, _until_compressing)
    elif config.compression == "powersgd":
        powersgd = powerSGD_hook.PowerSGDState(
            group,
            matrix_approximation_rank=config.powersgd_rank,
            start_powerSGD_iter=config.warmup_steps,
        )
        _states[model] = powersgd
        model.register_comm_hook(powersgd, powerSGD_hook.powerSGD_hook)
    else:
        fp16 = config.compression == "fp16"
        hook = default_hooks.fp16_compress_hook if fp16 else default_hooks.allreduce_hook
        model.register_comm_hook(group, hook)


def link_local_steps(
    model: nn.Module, group: dist.ProcessGroup, config: CommunicationConfig
) -> None:
    """Note on a model without DDP that the steps of its optimizer are local; not collective."""
    assert config.local_steps is not None, "asked for by the caller"
    _states[model] = LocalLink(
        group, config.local_steps, config.outer_learning_rate, config.outer_momentum
    )


def hook_state(model: nn.Module) -> object | None:
    """Return what a model's hook remembers: `OneBitState`, `LocalLink`, torch's `PowerSGDState`.

    None where there is nothing to remember.
    `PowerSGDState` can be pickled for a checkpoint; its errors belong to one rank.
    """
    return _states.get(model)


def _until_compressing(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - torch checks them
    if state.compressing:
        kept: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        kept.set_result(bucket.buffer())
        return kept
    return default_hooks.allreduce_hook(state.group, bucket)
