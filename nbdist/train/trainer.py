"""The trainer: `fit` is the story of a run, on every rank (ranks)."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from nbdist.errors import CheckpointError, NoWorldError
from nbdist.train import checkpoint
from nbdist.train.anomaly import AnomalyWatch
from nbdist.train.autosave import save_stopped
from nbdist.train.interrupt import StopRequest
from nbdist.train.mesh import data_parallel_place, degrees_of
from nbdist.train.metrics import ProgressLine, StepRecord, TrainHistory
from nbdist.train.optim import build_optimizer, validation_loss
from nbdist.train.parallelize import bare, mesh_of, parallelize
from nbdist.train.precision import deterministic
from nbdist.train.rng import restore_rng, seed_rng
from nbdist.train.steps import ForwardBackward

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
    AdamW, a learning rate that warms up and falls along a cosine, gradients clipped by the norm
    of the whole gradient.

    Args:
        model: built on every rank.
        data: equal on every rank; each takes its own rows.
        config: how to train.
        mesh: from `build_mesh`; when None, that of the model, or all ranks on `dp_shard`.

    Attributes:
        step: optimizer steps done.
        history: records of the steps since the start or the last resume.
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
        self.mesh = mesh_of(model, mesh)
        self.model = parallelize(model, self.mesh)
        self.optimizer = build_optimizer(self.model, config)
        self.step = 0
        self.history = TrainHistory()
        self._dataset = data
        self._rank, self._world_size = data_parallel_place(self.mesh)
        self._data = data.for_rank(
            global_batch_size=config.global_batch_size,
            rank=self._rank,
            world_size=self._world_size,
        )
        self._device = torch.device(self.mesh.device_type)
        self._forward_backward = ForwardBackward(self.model, self.mesh, config)
        self._parameters = list(self.model.parameters())
        self._group = dist.group.WORLD
        self._updating = False  # True only while weights and `step` do not belong together
        self._stop_agreed = False
        self._watch = AnomalyWatch(self.model, enabled=config.detect_anomaly)

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
            KeyboardInterrupt: Ctrl-C; the trainer stays usable. The text tells the step and the
                checkpoint.
        """
        self._begin(resume)
        shown = dist.get_rank() == 0
        total = self.config.num_steps
        line = ProgressLine(done=self.step, total=total, shown=shown)
        exact = deterministic(enabled=self.config.deterministic)
        with StopRequest() as stop, line, self._watch, exact:
            while self.step < total:
                record = self._evaluate_if_due(self._train_step(stop))
                self.history.records.append(record)
                line.show(record)
                saved = self._save_if_due(record)
                if self._stop_agreed:
                    raise KeyboardInterrupt(save_stopped(self, saved))
        return self.history

    def resume(self) -> TrainHistory:
        """Load the newest checkpoint and train on from it: `fit(resume=True)`.

        With as many ranks as wrote it, the losses that follow equal, bit for bit, those of the
        run that wrote it.
        """
        return self.fit(resume=True)

    def _train_step(self, stop: StopRequest) -> StepRecord:
        started = time.perf_counter()
        inputs, targets = self._on_device(self._data.batch(self.step))
        sharing: list[tuple[Tensor, dist.Work | None]] = []
        self._forward_backward(
            inputs, targets, lambda loss: sharing.append(self._share(loss, stop))
        )
        shared, sent = sharing[0]
        self._watch.raise_together(self.step + 1)
        norm, accepted = self._forward_backward.clip(self._parameters)
        rate = self._update(accepted=accepted)
        if sent is not None:
            sent.wait()
        # the only wait for the device in a step
        mean_loss, asked, grad_norm = torch.cat((shared, norm.reshape(1))).tolist()
        self._stop_agreed = asked > 0
        seconds = time.perf_counter() - started
        num_tokens = targets[0].numel() * self.config.global_batch_size
        return StepRecord(
            step=self.step,
            loss=mean_loss,
            learning_rate=rate,
            grad_norm=grad_norm,
            seconds=seconds,
            tokens_per_second=num_tokens / seconds,
        )

    def _share(self, loss: Tensor, stop: StopRequest) -> tuple[Tensor, dist.Work | None]:
        """Sum the loss, and whether a rank was asked to stop, while backward runs."""
        shared = torch.stack((loss, torch.full_like(loss, float(stop.asked))))
        return shared, dist.all_reduce(shared, async_op=True)

    def _update(self, *, accepted: bool) -> float:
        rate = self.config.learning_rate_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._updating = True
        if accepted:
            self.optimizer.step()
        self.step += 1
        self._updating = False
        self.optimizer.zero_grad()
        return rate

    def evaluate(self) -> float:
        """Return the mean loss over the validation split."""
        return validation_loss(self.model, self._data, self.config.loss_fn, self._device)

    def save(self) -> Path:
        """Write a checkpoint of the current step and return its path.

        Raises:
            ValueError: the configuration names no directory.
            CheckpointError: it could not be written.
        """
        where = self._checkpoint_config()
        tokenizer: Any = getattr(self._dataset, "tokenizer", None)
        model_config = getattr(bare(self.model), "config", None)
        described = {"train": self.config.describe()}
        if dataclasses.is_dataclass(model_config) and not isinstance(model_config, type):
            described["model"] = dataclasses.asdict(model_config)
        return checkpoint.save(
            where.directory,
            step=self.step,
            model=self.model,
            optimizer=self.optimizer,
            mesh=degrees_of(self.mesh),
            loss=self.history.losses[-1] if self.history.records else None,
            config=described,
            tokenizer_json=tokenizer.to_str() if hasattr(tokenizer, "to_str") else None,
            keep_last=where.keep_last,
        )

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint: weights, optimizer, step and random states.

        Random states belong to ranks: another number of ranks starts new ones from (seed, step,
        rank).
        """
        self.optimizer.zero_grad()
        manifest = checkpoint.load(path, self.model, self.optimizer)
        self.step = manifest.step
        self._updating = False
        self.history = TrainHistory()
        if manifest.world_size == dist.get_world_size():
            restore_rng(checkpoint.read_rng(path, dist.get_rank()))
        else:
            seed_rng(self.config.seed, self.step, dist.get_rank())
            _log.info(
                "%s was written by %d ranks and is loaded by %d: random states start anew from "
                "(seed=%d, step=%d, rank)",
                path,
                manifest.world_size,
                dist.get_world_size(),
                self.config.seed,
                self.step,
            )
        _log.info("resumed from %s at step %d", path, self.step)

    def _begin(self, resume: bool | Literal["auto"]) -> None:
        if dist.group.WORLD is not self._group:
            raise NoWorldError(
                "the process group was made anew after this trainer was built, and its model is "
                "sharded over the old one; build the model and the Trainer again, then call "
                'fit(resume="auto")'
            )
        newest = self._newest() if resume or (self.step == 0 and self.config.checkpoint) else None
        if resume is True and newest is None:
            checkpoint.latest(self._checkpoint_config().directory)  # raises, saying what is there
        if newest is not None and (resume is True or (resume and _step_of(newest) > self.step)):
            self.load(newest)
        elif newest is not None and self.step == 0:
            raise CheckpointError(
                f"{newest} is there already and this trainer is at step 0: a new run would mix "
                'with that one; call fit(resume="auto") to go on from it, or set another '
                "CheckpointConfig(directory=...)"
            )
        elif self.step == 0:
            seed_rng(self.config.seed, 0, dist.get_rank())
        self._stop_agreed = False
        self._check_ranks_agree()
        self.model.train()

    def _newest(self) -> Path | None:
        # one rank looks, so that all decide alike
        found = [checkpoint.list_checkpoints(self._checkpoint_config().directory)[-1:]]
        dist.broadcast_object_list(found, src=0)
        return found[0][0] if found[0] else None

    def _check_ranks_agree(self) -> None:
        states: list[tuple[int, bool]] = [(0, False)] * dist.get_world_size()
        dist.all_gather_object(states, (self.step, self._updating))
        if len(set(states)) > 1 or self._updating:
            steps = {rank: step for rank, (step, _) in enumerate(states)}
            raise CheckpointError(
                f"the last fit() was cut inside an update: the ranks' weights are of different "
                f"steps {steps}; call resume() to go on from the newest checkpoint, or build a "
                "new Trainer"
            )

    def _checkpoint_config(self) -> checkpoint.CheckpointConfig:
        if self.config.checkpoint is None:
            raise ValueError(
                "a checkpoint was asked for, but TrainConfig.checkpoint is None; set "
                "checkpoint=CheckpointConfig(directory=..., every_steps=...)"
            )
        return self.config.checkpoint

    def _evaluate_if_due(self, record: StepRecord) -> StepRecord:
        every = self.config.eval_every
        if every is None or record.step % every:
            return record
        return dataclasses.replace(record, validation_loss=self.evaluate())

    def _save_if_due(self, record: StepRecord) -> Path | None:
        where = self.config.checkpoint
        if where and (record.step % where.every_steps == 0 or record.step == self.config.num_steps):
            return self.save()
        return None

    def _on_device(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = pair
        return (
            inputs.to(self._device, non_blocking=True),
            targets.to(self._device, non_blocking=True),
        )


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
