"""Pipeline parallelism: stages of a model on different ranks, run by torch's schedules (ranks)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from nbdist.train.mesh import Axis, axis_rank, axis_size
from nbdist.train.parallelize.cutting import balance, costs_of, keep_units, stage_module, units_of
from nbdist.train.parallelize.schedule import SCHEDULES, check_schedule, schedule_grid

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from nbdist.train.parallelize.data import Sharding

__all__ = ["Pipeline", "PipelineConfig", "Stages", "plan_stages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """How a model is cut over `pp`, and in which order its ranks compute.

    Attributes:
        schedule: "gpipe", "1f1b", "interleaved", "zero_bubble" or "zbv"; `schedule_grid` shows one.
        num_micro_batches: that a rank's rows are cut into; divides their number.
        stages_per_rank: 1 for the first two, 2 for the others when None.
        cuts: names of the units that begin a stage, the first excepted; balanced when None.
        sample: inputs of one micro-batch, to measure what each unit costs; without it, their
            weights are counted.
    """

    schedule: str = "1f1b"
    num_micro_batches: int = 4
    stages_per_rank: int | None = None
    cuts: tuple[str, ...] | None = None
    sample: Tensor | None = None

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        single = self.schedule in ("gpipe", "1f1b")
        if self.num_micro_batches < 1 or (
            self.stages_per_rank is not None and (self.stages_per_rank == 1) is not single
        ):
            raise ValueError(
                f"PipelineConfig got schedule={self.schedule!r}, num_micro_batches="
                f"{self.num_micro_batches}, stages_per_rank={self.stages_per_rank}; set "
                f"num_micro_batches >= 1 and stages_per_rank {'= 1' if single else '>= 2'}"
            )

    @property
    def num_stages_a_rank(self) -> int:
        """Number of stages that each rank holds."""
        return self.stages_per_rank or (1 if self.schedule in ("gpipe", "1f1b") else 2)

    def owner(self, stage: int, pp: int) -> int:
        """Return the place on `pp` of a stage's rank."""
        if self.schedule == "zbv" and stage >= pp:
            return 2 * pp - 1 - stage
        return stage % pp


@dataclass(frozen=True, slots=True)
class Stages:
    """Which units make up each stage."""

    config: PipelineConfig
    units: list[str]
    parts: list[list[str]]


def plan_stages(model: nn.Module, mesh: DeviceMesh, config: PipelineConfig) -> Stages:
    """Return the cut of a model, measured and balanced. Collective over: all ranks.

    Raises:
        ValueError: it cannot be cut so; the text says where.
    """
    pp = axis_size(mesh, Axis.PP)
    schedule_grid(config.schedule, pp, config.num_micro_batches, config.stages_per_rank)
    units = units_of(model)
    num_stages = pp * config.num_stages_a_rank
    if config.cuts is None:
        starts = balance(costs_of(model, units, config.sample), num_stages)
    else:
        unknown = [cut for cut in config.cuts if cut not in units]
        if unknown or len(config.cuts) != num_stages - 1:
            raise ValueError(
                f"cuts={config.cuts} was given for {num_stages} stages: {num_stages - 1} names of "
                f"units are needed; the units are {', '.join(units)}"
            )
        starts = sorted([0, *(units.index(cut) for cut in config.cuts)])
    ends = [*starts[1:], len(units)]
    return Stages(config, units, [units[a:b] for a, b in zip(starts, ends, strict=True)])


class Pipeline:
    """This rank's stages of a model. Collective over: the mesh, as are all its methods.

    Args:
        model: whole; it keeps only this rank's units, under their names.
        mesh: the whole mesh.
        stages: from `plan_stages`.
        sharding: how FSDP shards the units; None leaves them whole.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, stages: Stages, sharding: Sharding | None
    ) -> None:
        self.stages = stages
        self._mesh = mesh[Axis.PP]
        self._place = axis_rank(mesh, Axis.PP)
        self._device = torch.device(mesh.device_type)
        self._model = model
        parts = {index: part for index, part in enumerate(stages.parts) if self.owns(index)}
        if sharding is not None:
            # a stage runs once a micro-batch: freeing its weights each time would gather them again
            sharding["reshard_after_forward"] = False
            for unit in (unit for part in parts.values() for unit in part):
                fully_shard(model.get_submodule(unit), **sharding)
        self._modules = {
            index: stage_module(model, stages.units, part) for index, part in parts.items()
        }
        for module in self._modules.values():
            module.register_forward_hook(_tensor_of)
        if sharding is not None:  # torch's stages tell the root of each when to reduce
            for module in self._modules.values():
                fully_shard(module, **sharding)
        keep_units(model, stages.units, {unit for part in parts.values() for unit in part})
        model.forward = _refuse
        self._schedules: dict[object, Any] = {}
        self._weight: Tensor | float = 1.0

    def owns(self, stage: int) -> bool:
        """Return whether a stage is this rank's."""
        return self.stages.config.owner(stage, self._mesh.size()) == self._place

    @property
    def has_last(self) -> bool:
        """Whether the last stage, where losses are, is this rank's."""
        return self.last_place == self._place

    @property
    def last_place(self) -> int:
        """The place on `pp` of the rank with the last stage."""
        return self.stages.config.owner(len(self.stages.parts) - 1, self._mesh.size())

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of this pipeline."""
        return self._mesh.get_group()

    def step(
        self, inputs: Tensor, targets: Tensor, loss_fn: Callable[..., Tensor], weight: float
    ) -> Tensor:
        """Leave the gradients of `weight` times the mean loss, and return that.

        It is 0 on ranks without the last stage.

        Args:
            inputs: (rows, ...), equal on all ranks of this pipeline.
            targets: of those rows.
            loss_fn: mean loss of a micro-batch.
            weight: of the mean loss.

        Raises:
            ValueError: the rows cannot be cut into micro-batches of equal size.
        """
        number = self.stages.config.num_micro_batches
        if len(inputs) % number:
            raise ValueError(
                f"{len(inputs)} rows cannot be cut into num_micro_batches={number} of equal size; "
                "set global_batch_size to a multiple of num_micro_batches x data ranks"
            )
        self._train(training=True)
        schedule = self._schedule(inputs, loss_fn)
        self._weight = weight / number
        losses: list[Tensor] = []
        first = (inputs,) if self.owns(0) else ()
        schedule.step(
            *first,
            target=targets if self.has_last else None,
            losses=losses if self.has_last else None,
            return_outputs=False,
        )
        if not losses:
            return torch.zeros((), device=self._device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def _schedule(self, inputs: Tensor, loss_fn: Callable[..., Tensor]) -> Any:
        key = (tuple(inputs.shape), inputs.dtype, loss_fn)
        if key not in self._schedules:  # torch's stages keep the shapes they saw first
            config, count = self.stages.config, len(self.stages.parts)
            stages = [
                PipelineStage(module, index, count, self._device, group=self.group)
                for index, module in self._modules.items()
            ]
            kind = get_schedule_class(SCHEDULES[config.schedule])
            single = issubclass(kind, PipelineScheduleSingle)
            self._schedules[key] = kind(
                stages[0] if single else stages,
                config.num_micro_batches,
                loss_fn=lambda output, target: loss_fn(output, target) * self._weight,
                scale_grads=False,
            )
        return self._schedules[key]

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor | None:
        """Return the model's output on the rank with the last stage, None elsewhere.

        Args:
            inputs: any number of rows, equal on all ranks of this pipeline.
        """
        self._train(training=False)
        value: Any = inputs
        last = len(self.stages.parts) - 1
        for stage in range(last + 1):
            if self.owns(stage):
                value = self._modules[stage](value)
            if stage < last and self.owns(stage) is not self.owns(stage + 1):
                value = self._hand_on(value, stage)
        self._train(training=True)
        return value if self.has_last else None

    def _hand_on(self, value: Any, stage: int) -> Any:
        pp = self._mesh.size()
        ranks = dist.get_process_group_ranks(self.group)
        source, target = (ranks[self.stages.config.owner(s, pp)] for s in (stage, stage + 1))
        if self.owns(stage):
            dist.send_object_list([(value.shape, value.dtype)], target, self.group)
            dist.send(value.contiguous(), target, self.group)
            return value
        if self.owns(stage + 1):
            what: list[Any] = [None]
            dist.recv_object_list(what, source, self.group)
            value = torch.empty(what[0][0], dtype=what[0][1], device=self._device)
            dist.recv(value, source, self.group)
        return value

    def _train(self, *, training: bool) -> None:
        for module in self._modules.values():
            module.train(training)


def _tensor_of(_: nn.Module, __: Any, output: Any) -> Tensor:
    """Return what the next stage takes; Hugging Face models wrap it."""
    for name in ("logits", "last_hidden_state"):
        output = getattr(output, name, output)
    if not isinstance(output, torch.Tensor):
        raise TypeError(
            f"a pipeline stage returned {type(output).__name__}, but stages hand on one tensor; "
            "let the model return a tensor, or an object with `logits`"
        )
    return output


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "a model that is cut over pp was called: no rank holds all of it; train it with Trainer, "
        "or call applied_to(model).pipeline.step(...) or .forward(...) on all ranks of the pipeline"
    )
