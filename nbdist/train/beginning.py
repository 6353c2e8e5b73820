"""What a trainer settles with the other ranks before its first step (ranks)."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from nbdist.errors import CheckpointError, NoWorldError
from nbdist.train import checkpoint
from nbdist.train.learning_rate import batch_line
from nbdist.train.manifest import set_aside, some, step_of
from nbdist.train.rng import restore_rng, seed_rng

if TYPE_CHECKING:
    from nbdist.train.config import TrainConfig
    from nbdist.train.manifest import Manifest
    from nbdist.train.saving import CheckpointConfig
    from nbdist.train.trainer import Trainer

__all__ = [
    "begin",
    "check_ranks_agree",
    "checkpoint_config",
    "leave_later",
    "newest_for_all",
    "restore_random_states",
]

_log = logging.getLogger(__name__)


def begin(
    trainer: Trainer,
    resume: bool | Literal["auto"],
    group: dist.ProcessGroup | None,
    *,
    updating: bool,
) -> None:
    """Bring a trainer to the step that it goes on from. Collective over: the default group.

    Args:
        trainer: of `Trainer.fit`.
        resume: as in `Trainer.fit`.
        group: that the trainer was built on.
        updating: the last step was cut inside its update.

    Raises:
        CheckpointError, NoWorldError: as in `Trainer.fit`.
    """
    if dist.group.WORLD is not group:
        raise NoWorldError(
            "the process group was made anew after this trainer was built, and its model is "
            "sharded over the old one; build the model and the Trainer again, then call "
            'fit(resume="auto")'
        )
    config = trainer.config
    looks = resume or (trainer.step == 0 and config.checkpoint)
    newest = newest_for_all(checkpoint_config(config)) if looks else None
    if resume is True and newest is None:
        checkpoint.latest(checkpoint_config(config).directory)  # raises, saying what is there
    if newest is not None and (resume is True or (resume and step_of(newest) > trainer.step)):
        trainer.load(newest)
        updating = False
    elif newest is not None and trainer.step == 0:
        raise CheckpointError(
            f"{newest} is there already and this trainer is at step 0: a new run would mix "
            'with that one; call fit(resume="auto") to go on from it, or set another '
            "CheckpointConfig(directory=...)"
        )
    elif trainer.step == 0:
        seed_rng(config.seed, 0, dist.get_rank())
    check_ranks_agree(trainer.step, updating=updating)
    told = leave_later(config.checkpoint, trainer.step) if config.checkpoint else ""
    if told and dist.get_rank() == 0:
        text = f"training goes on from step {trainer.step}: {told}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    if dist.get_rank() == 0:
        _log.info("%s", batch_line(config, trainer.data_place[1]))


def checkpoint_config(config: TrainConfig) -> CheckpointConfig:
    """Return where the run saves.

    Raises:
        ValueError: nowhere.
    """
    if config.checkpoint is None:
        raise ValueError(
            "a checkpoint was asked for, but TrainConfig.checkpoint is None; set "
            "checkpoint=CheckpointConfig(directory=..., every_steps=...)"
        )
    return config.checkpoint


def newest_for_all(where: CheckpointConfig) -> Path | None:
    """Return the newest checkpoint, the same on all. Collective over: the default group."""
    found = [checkpoint.list_checkpoints(where.directory)[-1:]]
    dist.broadcast_object_list(found, src=0)
    return found[0][0] if found[0] else None


def leave_later(where: CheckpointConfig, step: int) -> str:
    """Set the checkpoints of later steps aside: a run that has gone back makes others of its own.

    Else `resume` would load them, and pruning keep them. Collective over: the default group.

    Returns:
        What to tell the user; empty when there are none.

    Raises:
        CheckpointError: one cannot be renamed.
    """
    told = ["", ""]
    if dist.get_rank() == 0:
        try:
            names = set_aside(Path(where.directory), step)
        except OSError as error:
            told[1] = (
                f"the checkpoints after step {step} in {where.directory} were to be set aside, but "
                f"{error}; mend that, or move them away"
            )
        else:
            if names:
                told[0] = (
                    f"the later checkpoints are set aside as {some(names)}; delete them, or rename "
                    "them back"
                )
    dist.broadcast_object_list(told, src=0)
    if told[1]:
        raise CheckpointError(told[1])
    return told[0]


def check_ranks_agree(step: int, *, updating: bool) -> None:
    """Refuse weights of different steps. Collective over: the default group.

    Raises:
        CheckpointError: the last `fit` was cut inside an update.
    """
    states: list[tuple[int, bool]] = [(0, False)] * dist.get_world_size()
    dist.all_gather_object(states, (step, updating))
    if len(set(states)) > 1 or updating:
        steps = {rank: step for rank, (step, _) in enumerate(states)}
        raise CheckpointError(
            f"the last fit() was cut inside an update: the ranks' weights are of different "
            f"steps {steps}; call resume() to go on from the newest checkpoint, or build a "
            "new Trainer"
        )


def restore_random_states(path: str | Path, manifest: Manifest, seed: int) -> None:
    """Set this rank's random states as in a checkpoint; they start anew on other numbers of ranks.

    Args:
        path: of the checkpoint.
        manifest: of it.
        seed: of the run.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if manifest.world_size == world_size:
        restore_rng(checkpoint.read_rng(path, rank))
        return
    seed_rng(seed, manifest.step, rank)
    _log.info(
        "%s was written by %d ranks and is loaded by %d: random states start anew from (seed=%d, "
        "step=%d, rank)",
        path,
        manifest.world_size,
        world_size,
        seed,
        manifest.step,
    )
