"""Forward and backward of one step: micro-batches and each rank's share of the loss (ranks)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbdist.train.mesh import data_parallel_place
from nbdist.train.models import auxiliary_loss
from nbdist.train.optim import clip_gradients
from nbdist.train.parallelize import (
    applied_to,
    last_micro_batch,
    loss_context,
    own_tokens,
    whole,
)
from nbdist.train.phases import Clock, Phase, mark_backward_end
from nbdist.train.precision import LossScale, autocast

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from nbdist.train.config import TrainConfig

__all__ = ["ForwardBackward", "on_device"]


class ForwardBackward:
    """Computes the gradients of a rank's rows. Collective over: the mesh.

    Args:
        model: from `parallelize`.
        mesh: the whole mesh.
        config: how to train.
        clock: is told when forward and backward end.

    Attributes:
        scale: what the gradients are multiplied with.

    Raises:
        ValueError: a micro-batch would have no row on some rank.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, config: TrainConfig, clock: Clock
    ) -> None:
        self._model = model
        self._has_run = False
        self._config = config
        self._clock = clock
        self.scale = LossScale(enabled=config.autocast_dtype == "float16")
        applied = applied_to(model)
        self._pipeline = applied.pipeline if applied else None
        if self._pipeline is not None and config.accumulation_steps > 1:
            raise ValueError(
                f"accumulation_steps={config.accumulation_steps} was asked for a model cut over "
                "pp, whose rows are cut into micro-batches already; set "
                "PipelineConfig(num_micro_batches=...) instead"
            )
        _, self._num_data_ranks = data_parallel_place(mesh)
        # ranks that compute the loss of the same rows; summed over all ranks it counts once
        self._num_copies = dist.get_world_size() // self._num_data_ranks
        fewest = config.global_batch_size // self._num_data_ranks
        if fewest < config.accumulation_steps:
            raise ValueError(
                f"accumulation_steps={config.accumulation_steps} was asked for, but a rank has "
                f"{fewest} rows of global_batch_size={config.global_batch_size}; set "
                f"accumulation_steps <= {fewest} or global_batch_size >= "
                f"{config.accumulation_steps * self._num_data_ranks}"
            )

    def __call__(self, inputs: Tensor, targets: Tensor, share: Callable[[Tensor], None]) -> None:
        """Leave gradients in the model.

        Args:
            inputs: this rank's rows.
            targets: of those rows.
            share: called once, before the last backward, with this rank's part of the mean loss
                of the global batch: a scalar that sums to it over all ranks.
        """
        self._has_run = True
        if self._pipeline is not None:
            self._piped(inputs, targets, share)
            return
        number = self._config.accumulation_steps
        targets = own_tokens(self._model, targets)
        parts = zip(inputs.tensor_split(number), targets.tensor_split(number), strict=True)
        total = torch.zeros((), device=inputs.device)
        for index, (rows, row_targets) in enumerate(parts):
            is_last = index == number - 1
            with last_micro_batch(self._model, is_last=is_last), loss_context(self._model):
                with autocast(self._config.autocast_dtype, inputs.device):
                    loss = whole(self._config.loss_fn(self._model(rows), row_targets))
                # gradients are averaged over data ranks, whose rows may be dealt unevenly
                weight = len(rows) * self._num_data_ranks / self._config.global_batch_size
                part = loss.detach() * (weight / self._num_data_ranks / self._num_copies)
                total = total + part
                if is_last:
                    self._tell(share, total)
                extra = auxiliary_loss(self._model)
                loss = loss if extra is None else loss + extra
                factor = weight * self.scale.value
                self._clock.mark(Phase.FORWARD)
                mark_backward_end(loss, self._clock)
                (loss if factor == 1 else loss * factor).backward()  # type: ignore[no-untyped-call]
                self._clock.mark(Phase.COMMUNICATION)  # DDP's wait at the end of backward

    def warm_up(self, batch: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Have DDP order its buckets before weights are loaded.

        It does so in its first step, after which the gradients of more than two ranks are summed
        in another order: without this, a run that goes on would differ in the last bits.

        Args:
            batch: returns any inputs and targets; the gradients are of no use.
        """
        if not self._has_run and isinstance(self._model, DistributedDataParallel):
            self(*batch(), lambda _: None)

    def clip(self, parameters: list[nn.Parameter]) -> tuple[Tensor, bool]:
        """Clip the gradients; return the norm they had, and whether to take the step."""
        pipeline = self._pipeline.group if self._pipeline else None
        norm = clip_gradients(
            parameters, self._config.clip_norm, scale=self.scale.value, pipeline=pipeline
        )
        return norm, self.scale.accept(norm)

    def _piped(self, inputs: Tensor, targets: Tensor, share: Callable[[Tensor], None]) -> None:
        assert self._pipeline is not None, "checked by the caller"
        weight = len(inputs) * self._num_data_ranks / self._config.global_batch_size
        scale = self.scale.value
        dtype = self._config.autocast_dtype
        with loss_context(self._model), autocast(dtype, inputs.device):
            loss = self._pipeline.step(inputs, targets, self._config.loss_fn, weight * scale)
        pp = len(dist.get_process_group_ranks(self._pipeline.group))
        # of the ranks with these rows, one in pp has a loss: it stands for the others
        # float64: all ranks must send one dtype, and only the last stage knows that of its loss
        part = whole(loss).double() * (pp / scale / self._num_data_ranks / self._num_copies)
        self._tell(share, part)

    def _tell(self, share: Callable[[Tensor], None], part: Tensor) -> None:
        self._clock.mark(Phase.FORWARD)
        share(part)
        self._clock.mark(Phase.COMMUNICATION)


def on_device(pair: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets on a device, without waiting for the copies."""
    inputs, targets = pair
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
