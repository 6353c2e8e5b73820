"""What a trainer settles with the other ranks before its first step (ranks)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from nbdist.errors import CheckpointError
from nbdist.train import checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.train.config import TrainConfig
    from nbdist.train.saving import CheckpointConfig

__all__ = ["check_ranks_agree", "checkpoint_config", "newest_for_all"]


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
