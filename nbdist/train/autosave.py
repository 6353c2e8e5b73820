"""What a trainer saves, and what becomes of a run that Ctrl-C has stopped (ranks)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from nbdist.errors import CheckpointError
from nbdist.train import checkpoint
from nbdist.train.beginning import checkpoint_config
from nbdist.train.mesh import degrees_of
from nbdist.train.parallelize import bare

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist.train.trainer import Trainer

__all__ = ["save_stopped", "snapshot_of"]


def snapshot_of(trainer: Trainer, data: object) -> checkpoint.Snapshot:
    """Collect what a checkpoint of a trainer holds. Collective over: the default group.

    Raises:
        ValueError: the configuration names no directory.
    """
    where = checkpoint_config(trainer.config)
    tokenizer: Any = getattr(data, "tokenizer", None)
    model_config: Any = getattr(bare(trainer.model), "config", None)
    described = {"train": trainer.config.describe()}
    if hasattr(model_config, "to_dict"):
        described["transformers"] = model_config.to_dict()
    elif dataclasses.is_dataclass(model_config) and not isinstance(model_config, type):
        described["model"] = dataclasses.asdict(model_config)
    return checkpoint.take(
        where.directory,
        step=trainer.step,
        model=trainer.model,
        optimizer=trainer.optimizer,
        mesh=degrees_of(trainer.mesh),
        loss=trainer.history.losses[-1] if trainer.history.records else None,
        loss_scale=trainer.loss_scale.state,
        config=described,
        tokenizer_json=tokenizer.to_str() if hasattr(tokenizer, "to_str") else None,
        keep_last=where.keep_last,
        keep_every=where.keep_every,
    )


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
        if saved is not None:
            trainer.finish_saving()
        path = saved or trainer.save()
    except CheckpointError as error:
        return f"{stopped}; {error}"
    return f"{stopped}; saved {path}, from which resume() in a new Trainer goes on"
