"""The trainer: `fit` is the story of a run, on every rank (ranks)."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from nbdist.train import checkpoint
from nbdist.train.anomaly import AnomalyWatch
from nbdist.train.autosave import save_stopped, snapshot_of
from nbdist.train.beginning import begin, restore_random_states
from nbdist.train.flips import FlipCheck
from nbdist.train.interrupt import StopRequest
from nbdist.train.learning_rate import batch_line
from nbdist.train.mesh import data_parallel_place
from nbdist.train.metrics import ProgressLine, StepRecord, TrainHistory
from nbdist.train.optim import build_optimizer, validation_loss
from nbdist.train.parallelize import mesh_of, parallelize
from nbdist.train.phases import Phase
from nbdist.train.precision import deterministic
from nbdist.train.saving import Saver
from nbdist.train.scaling import ScalingReport, measure
from nbdist.train.steps import ForwardBackward, on_device
from nbdist.train.survival import Survival
from nbdist.train.timing import Timing

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from nbdist.train.config import TrainConfig
    from nbdist.train.data import TrainData

__all__ = ["Trainer"]

_log = logging.getLogger(__name__)


class Trainer:
    """Trains a model on all ranks. Collective over: the default group, as are all its methods.

    A whole model is sharded over `mesh` first; one that `parallelize` returned is taken as it is,
    on its own mesh.
    AdamW, a learning rate that warms up and falls along a cosine, gradients clipped by their norm.

    Args:
        model: built on every rank.
        data: equal on every rank; each takes its own rows.
        config: how to train.
        mesh: from `build_mesh`; when None, that of the model, or all ranks on `dp_shard`.

    Attributes:
        step: optimizer steps done.
        history: records of the steps since the start or the last resume.
        timing: where the time of the last steps went, by rank and phase.
        loss_scale: of float16 gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        data: TrainData,
        config: TrainConfig,
        *,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.config = config
        self.step = 0
        self.history = TrainHistory()
        self.survival = Survival(self, data)
        self._dataset = data
        self.assemble(model, mesh_of(model, mesh))

    def __repr__(self) -> str:
        line = batch_line(self.config, self.data_place[1])
        return f"Trainer(step {self.step} of {self.config.num_steps}, {line})"

    def assemble(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Build what belongs to one life of the process group; `step` and `history` stay."""
        config = self.config
        self.mesh = mesh
        self.model = parallelize(model, mesh)
        self.optimizer = build_optimizer(self.model, config)
        rank, world_size = self.data_place = data_parallel_place(mesh)
        self.data = self._dataset.for_rank(
            global_batch_size=config.global_batch_size, rank=rank, world_size=world_size
        )
        self._device = torch.device(mesh.device_type)
        self.timing = Timing.of(self.model, config, self._device)
        self._forward_backward = ForwardBackward(self.model, mesh, config, self.timing.clock)
        self.loss_scale = self._forward_backward.scale
        self._parameters = list(self.model.parameters())
        self._group = dist.group.WORLD
        self.updating = False  # True only while weights and `step` do not belong together
        self._stop_agreed = self._save_agreed = False
        self._saver = Saver(config.checkpoint)
        self._watch = AnomalyWatch(self.model, enabled=config.detect_anomaly)
        self._flips = FlipCheck(self.model, self.optimizer, mesh, config)

    def fit(self, *, resume: bool | Literal["auto"] = False) -> TrainHistory:
        """Train until `num_steps` steps are done, and return the history.

        Called again, it goes on from `step`: nothing is trained twice. Ctrl-C ends it after the
        running step, on all ranks alike, and saves that step if checkpoints are configured; a
        second Ctrl-C ends it at once.

        Args:
            resume: True loads the newest checkpoint first and requires one; "auto" loads it if
                it is ahead of this trainer.

        Raises:
            CheckpointError: nothing to resume from, another run's checkpoints are in the way, or
                the ranks' weights do not belong together.
            NoWorldError: the process group of the model is gone.
            NonFiniteError: with `detect_anomaly`, a layer returned NaN or infinity.
            StateMismatchError: with `check_every`, replicas were not equal.
            KeyboardInterrupt: Ctrl-C; the trainer stays usable. The text tells the step and the
                checkpoint.
        """
        self._saver.settle()
        begin(self, resume, self._group, updating=self.updating)
        return self.go_on()

    def go_on(self) -> TrainHistory:
        """Train from `step` to the end: `fit` without its beginning, as a new rank does."""
        self._stop_agreed = False
        self.model.train()
        line = ProgressLine(done=self.step, total=self.config.num_steps, shown=dist.get_rank() == 0)
        exact = deterministic(enabled=self.config.deterministic)
        with StopRequest() as stop, line, exact, self.survival:
            while not self._has_run(stop, line):
                pass
        return self.history

    def _has_run(self, stop: StopRequest, line: ProgressLine) -> bool:
        """Run all steps; False after a failure that the run has survived."""
        try:
            with self._watch, self._saver:
                while self.step < self.config.num_steps:
                    self._run_step(stop, line)
                self._saver.settle()
        except self.survival.failures as error:
            self.survival.recover(error)
            return False
        return True

    def _run_step(self, stop: StopRequest, line: ProgressLine) -> None:
        self.history.records.append(self._train_step(stop))
        self._flips.check(self.step)
        self.timing.clock.mark(None)
        self.survival.step_done()
        self.timing.clock.mark(Phase.SAVE)
        saved = self.finish_step()
        self.timing.clock.mark(Phase.SAVE)
        line.show(self.history.records[-1], self.timing.glance)
        if self.config.on_step is not None:
            self.config.on_step(self.history.records[-1])
        if self._stop_agreed:
            raise KeyboardInterrupt(save_stopped(self, saved))

    def finish_step(self) -> Path | None:
        """Evaluate and save, if due after the last step; may be called again for that step.

        Returns:
            The checkpoint of that step; None when none was due.
        """
        self.model.train()
        records = self.history.records
        if not records or records[-1].step != self.step:
            return None
        every = self.config.eval_every
        if every is not None and self.step % every == 0:
            records[-1] = dataclasses.replace(records[-1], validation_loss=self.evaluate())
        self.timing.clock.mark(None)
        ends = self._save_agreed or self.step == self.config.num_steps
        if not self._saver.is_due(self.step, ends=ends):
            return None
        with self._saver.tolerant():
            return self._saver.save(snapshot_of(self, self._dataset))
        return None

    def resume(self) -> TrainHistory:
        """Go on from the newest checkpoint, bit for bit on as many ranks: `fit(resume=True)`."""
        return self.fit(resume=True)

    def _train_step(self, stop: StopRequest) -> StepRecord:
        started = time.perf_counter()
        self.timing.begin()
        inputs, targets = on_device(self.data.batch(self.step), self._device)
        self.timing.clock.mark(Phase.DATA)
        sharing: list[tuple[Tensor, dist.Work | None]] = []
        self._forward_backward(
            inputs, targets, lambda loss: sharing.append(self._share(loss, stop))
        )
        shared, sent = sharing[0]
        self._watch.raise_together(self.step + 1)
        norm, accepted = self._forward_backward.clip(self._parameters)
        rate = self._update(accepted=accepted)
        self.timing.clock.mark(Phase.OPTIMIZER)
        if sent is not None:
            sent.wait()
        # the only wait for the device in a step
        told = torch.cat((norm.reshape(1), shared)).tolist()
        grad_norm, mean_loss, asked, due, failed = told[:5]
        self.timing.clock.mark(Phase.COMMUNICATION)
        self.timing.take(told[5:])
        self._stop_agreed, self._save_agreed = asked > 0, due > 0
        if failed > 0:
            self._saver.settle()
        seconds = time.perf_counter() - started
        speed = targets[0].numel() * self.config.global_batch_size / seconds
        return StepRecord(
            step=self.step,
            loss=mean_loss,
            learning_rate=rate,
            grad_norm=grad_norm,
            seconds=seconds,
            tokens_per_second=speed,
            mfu=self.timing.mfu(speed, targets[0].numel()),
        )

    def _share(self, loss: Tensor, stop: StopRequest) -> tuple[Tensor, dist.Work | None]:
        """Sum the loss, and what a rank has to tell, while backward runs."""
        self.survival.settle()
        told = (stop.asked, *self._saver.wishes(), *self.timing.told())
        shared = torch.cat((loss.reshape(1), loss.new_tensor(told)))
        return shared, dist.all_reduce(shared, async_op=True)

    def _update(self, *, accepted: bool) -> float:
        self._saver.before_update()
        rate = self.config.learning_rate_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.updating = True
        if accepted:
            self.optimizer.step()
        self.step += 1
        self.updating = False
        self.optimizer.zero_grad()
        return rate

    def notes(self) -> list[float]:
        """Return what else the next steps depend on, as numbers."""
        return self.loss_scale.notes()

    def take_notes(self, step: int, notes: list[float]) -> None:
        """Be at a step, with the notes that were taken then."""
        self.step = step
        self.loss_scale.take_notes(notes)

    def warm_up(self) -> None:
        """See `ForwardBackward.warm_up`. Collective over: all ranks."""
        self._forward_backward.warm_up(lambda: on_device(self.data.batch(self.step), self._device))
        self.optimizer.zero_grad()

    def evaluate(self) -> float:
        """Return the mean loss over the validation split."""
        return validation_loss(self.model, self.data, self.config.loss_fn, self._device)

    def scaling_report(self, num_steps: int = 5) -> ScalingReport:
        """Compare the run with one rank; see `nbdist.train.scaling.measure`. Collective."""
        return measure(self, self._dataset, num_steps)

    def save(self) -> Path:
        """Write a checkpoint of the current step and return its path when it is complete.

        Raises:
            ValueError: the configuration names no directory.
            CheckpointError: it could not be written.
        """
        path = self._saver.save(snapshot_of(self, self._dataset))
        self._saver.wait()
        return path

    def finish_saving(self) -> None:
        """Wait until the save that runs in the background is complete; raises CheckpointError."""
        self._saver.wait()

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint: weights, optimizer, step and random states.

        Random states belong to ranks: another number of ranks starts new ones from (seed, step,
        rank).
        """
        self.warm_up()
        manifest = checkpoint.load(path, self.model, self.optimizer)
        self.step = manifest.step
        self.updating = False
        self.loss_scale.restore(manifest.loss_scale)
        self.history = TrainHistory()
        restore_random_states(path, manifest, self.config.seed)
        _log.info("resumed from %s at step %d", path, self.step)
