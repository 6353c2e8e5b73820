"""What becomes of a run that Ctrl-C has stopped between two steps (ranks)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.train.trainer import Trainer

__all__ = ["save_stopped"]


def save_stopped(trainer: Trainer, saved: Path | None) -> str:
    """Save a stopped run as its configuration says. Collective over: the default group.

    A KeyboardInterrupt in here leaves no checkpoint of this step, never a part of one.

    Args:
        trainer: stopped after the same step on all ranks.
        saved: the checkpoint that was due at this step anyway.

    Returns:
        What to tell the user: the step, where it is saved or how to save it, how to go on.
    """
    stopped = f"stopped after step {trainer.step}; fit() goes on"
    where = trainer.config.checkpoint
    if where is None:
        return (
            f"{stopped}; no checkpoint was written: TrainConfig has no "
            "checkpoint=CheckpointConfig(directory=..., every_steps=...)"
        )
    if saved is None and not where.save_on_stop:
        return f"{stopped}; trainer.save() writes a checkpoint of this step"
    try:
        path = saved or trainer.save()
    except CheckpointError as error:
        return f"{stopped}; {error}"
    return f"{stopped}; saved {path}, from which resume() in a new Trainer goes on"
