"""What more ranks bring a run, against one rank that does the same work alone (ranks)."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbdist.errors import NbdistError
from nbdist.train.models import auxiliary_loss
from nbdist.train.optim import build_optimizer, clip_gradients
from nbdist.train.parallelize import applied_to
from nbdist.train.precision import autocast
from nbdist.train.steps import on_device

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nbdist.train.config import TrainConfig
    from nbdist.train.data import TrainData
    from nbdist.train.trainer import Trainer

__all__ = ["ScalingReport", "measure"]

_WARM_STEPS = 2  # of the run: allocations, and DDP's order of buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingReport:
    """One global batch a step, on all ranks and on one.

    Attributes:
        num_ranks: of the run.
        tokens_per_step: target tokens of the global batch.
        seconds: of a step of the run, the slowest rank's; median.
        seconds_alone: of a step on one rank; median.
        communication: share of the run's time that ranks wait in collectives.
    """

    num_ranks: int
    tokens_per_step: int
    seconds: float
    seconds_alone: float
    communication: float

    @property
    def speedup(self) -> float:
        """How many times faster all ranks are than one."""
        return self.seconds_alone / self.seconds

    @property
    def efficiency(self) -> float:
        """Speed-up over the number of ranks."""
        return self.speedup / self.num_ranks

    def __str__(self) -> str:
        def speed(seconds: float) -> str:
            return f"{self.tokens_per_step / seconds:,.0f} tokens/s, {seconds * 1e3:,.1f} ms a step"

        return (
            f"{self.num_ranks} ranks: {speed(self.seconds)}; 1 rank: {speed(self.seconds_alone)}; "
            f"speed-up {self.speedup:.2f}, efficiency {self.efficiency:.0%}, communication "
            f"{self.communication:.0%} of the time"
        )


def measure(trainer: Trainer, data: TrainData, num_steps: int) -> ScalingReport:
    """Compare the last steps of a run with steps of rank 0 alone, while the others wait.

    Collective over: the default group. Rank 0 trains a plain whole copy of the model, with other
    weights, on the global batch in micro-batches as large as a rank's; it needs the memory for
    that. Trainer, data and random states are left as they were. Ranks that share cores leave them
    to the one, as a run of one rank would find them.

    Args:
        trainer: that has trained.
        data: its whole data set.
        num_steps: steps to compare, after one that warms up.

    Raises:
        ValueError: too few steps since the start or the last resume.
        NbdistError: on all ranks, when the copy could not be made or trained.
    """
    records = trainer.history.records[_WARM_STEPS:]
    if num_steps < 1 or len(records) < num_steps:
        raise ValueError(
            f"scaling_report(num_steps={num_steps}) was asked for after "
            f"{len(trainer.history)} steps, of which the first {_WARM_STEPS} do not count; "
            f"train at least {max(num_steps, 1) + _WARM_STEPS} steps first"
        )
    own = statistics.median(record.seconds for record in records[-num_steps:])
    tokens = round(records[-1].tokens_per_second * records[-1].seconds)
    answer: tuple[float, str] = (0.0, "")
    if dist.get_rank() == 0:
        answer = _try_alone(trainer, data, num_steps)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (own, *answer))
    _, alone, problem = everyone[0]
    if problem:
        raise NbdistError(
            "a scaling report was asked for, which trains the whole model on rank 0 alone, but "
            f"there it raised {problem}; free memory, or measure a smaller model"
        )
    return ScalingReport(
        num_ranks=len(everyone),
        tokens_per_step=tokens,
        seconds=max(seconds for seconds, _, _ in everyone),
        seconds_alone=alone,
        communication=trainer.timing.communication,
    )


def _try_alone(trainer: Trainer, data: TrainData, num_steps: int) -> tuple[float, str]:
    """Return the median seconds of a step, or what was raised."""
    device = torch.device(trainer.mesh.device_type)
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            return _alone(trainer, data, num_steps, device), ""
        except Exception as error:  # noqa: BLE001 - raised on all ranks, which wait for an answer
            return 0.0, f"{type(error).__name__}: {error}"


def _alone(trainer: Trainer, data: TrainData, num_steps: int, device: torch.device) -> float:
    config = trainer.config
    model = _whole_copy(trainer.model, device)
    optimizer = build_optimizer(model, config)
    rows = data.for_rank(global_batch_size=config.global_batch_size, rank=0, world_size=1)
    _, num_data_ranks = trainer.data_place
    num_parts = num_data_ranks * config.accumulation_steps
    seconds = []
    for step in range(num_steps + 1):
        started = time.perf_counter()
        inputs, targets = on_device(rows.batch(step), device)
        _backward(model, config, inputs.tensor_split(num_parts), targets.tensor_split(num_parts))
        norm = clip_gradients(list(model.parameters()), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        norm.item()  # waits for the device
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _whole_copy(model: nn.Module, device: torch.device) -> nn.Module:
    applied = applied_to(model)
    if applied is None or applied.again is None:
        raise NbdistError("the model came spread over the ranks: there is no whole one")
    whole = applied.again.skeleton.build(device).to(device)
    with torch.no_grad():
        for parameter in whole.parameters():  # they have no values; odd ones may compute slowly
            parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    return whole.train()


def _backward(
    model: nn.Module,
    config: TrainConfig,
    inputs: tuple[Tensor, ...],
    targets: tuple[Tensor, ...],
) -> None:
    for rows, row_targets in zip(inputs, targets, strict=True):
        with autocast(config.autocast_dtype, rows.device):
            loss = config.loss_fn(model(rows), row_targets)
        extra = auxiliary_loss(model)
        loss = loss if extra is None else loss + extra
        (loss * (len(rows) / config.global_batch_size)).backward()  # type: ignore[no-untyped-call]
