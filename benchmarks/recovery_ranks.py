"""What the ranks of `recovery.py` run: a trainer whose rank is killed at a step (ranks).

As a script, for torchrun: `recovery_ranks.py STRATEGY PHASE STEP VICTIM DIRECTORY NUM_STEPS`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbdist.train import (
    CheckpointConfig,
    DecoderConfig,
    DecoderLM,
    TextData,
    TrainConfig,
    Trainer,
    build_mesh,
    manifest,
    next_token_loss,
    parallelize,
    shakespeare,
)

if TYPE_CHECKING:
    from torch import Tensor


_built_on: Any = None  # the process group of the trainer that was built last in this process


class Fatal:
    """A loss function that ends its rank at a step, once, and notes when steps end after that."""

    def __init__(self, phase: str, step: int, victim: int, directory: str) -> None:
        self.phase, self.step, self.victim, self.directory = phase, step, victim, Path(directory)
        self.trainer: Any = None
        self.calls_after = 0
        self.is_restarted = (self.directory / "killed").exists()

    def is_due(self, phase: str) -> bool:
        """Return whether this rank is to end here."""
        return (
            phase == self.phase
            and dist.get_rank() == self.victim
            and self.trainer.step == self.step
            and (self.directory / "armed").exists()
        )

    def die(self) -> None:
        """End this process as the kernel would."""
        (self.directory / "armed").unlink()
        (self.directory / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, or not at all."""
        is_after = self.is_restarted or dist.group.WORLD is not _built_on
        if is_after and dist.get_rank() == 0:
            self._note_step()
        loss = next_token_loss(logits, targets)
        if self.is_due("forward"):
            self.die()
        if self.is_due("backward"):
            loss.register_hook(lambda _: self.die())
        return loss

    def _note_step(self) -> None:
        """Note when the first step after the death has ended: in the loss of the next one."""
        self.calls_after += 1
        is_ddp = isinstance(self.trainer.model, DistributedDataParallel)
        if self.calls_after == 2 + is_ddp:  # DDP warms up before it is restored
            (self.directory / "stepped").write_text(str(time.time()))


def build(
    *,
    strategy: str,
    phase: str,
    step: int,
    victim: int,
    directory: str,
    num_steps: int,
    on_failure: str,
) -> Trainer:
    """Return a trainer whose rank `victim` ends in a phase of the step after `step` steps."""
    global _built_on  # noqa: PLW0603 - one rank is one process
    _built_on = dist.group.WORLD
    torch.manual_seed(0)
    fatal = Fatal(phase, step, victim, directory)
    saving = CheckpointConfig(
        directory=Path(directory, "saved"), every_steps=1 if on_failure == "stop" else 2,
        every_minutes=None, keep_last=2,
    )  # fmt: skip
    data = TextData(shakespeare()[:200_000], vocab_size=512, context_length=64)
    config = DecoderConfig(vocab_size=512, num_layers=2, hidden_size=96, context_length=64)
    model = parallelize(DecoderLM(config), build_mesh(), strategy=strategy)  # type: ignore[arg-type]
    trainer = Trainer(
        model,
        data,
        TrainConfig(
            num_steps=num_steps,
            loss_fn=fatal,
            checkpoint=saving,
            on_failure=on_failure,
            max_failures=100,
        ),
    )
    fatal.trainer = trainer
    if phase == "optimizer":
        trainer.optimizer.register_step_pre_hook(
            lambda *_: fatal.die() if fatal.is_due("optimizer") else None
        )
    if phase == "save":
        _die_in_save(fatal)
    return trainer


def _die_in_save(fatal: Fatal) -> None:
    from nbdist.train import checkpoint

    digests = manifest.digests

    def fatal_digests(paths: Any) -> dict[str, str]:
        due = fatal.phase == "save" and dist.get_rank() == fatal.victim
        if due and fatal.trainer.step >= fatal.step and (fatal.directory / "armed").exists():
            fatal.die()
        return digests(paths)

    checkpoint.digests = fatal_digests


def main() -> None:
    """Train under torchrun: after a failure all processes begin again from the checkpoint."""
    strategy, phase, step, victim, directory, num_steps = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    trainer = build(
        strategy=strategy, phase=phase, step=int(step), victim=int(victim), directory=directory,
        num_steps=int(num_steps), on_failure="stop",
    )  # fmt: skip
    trainer.fit(resume="auto")
    dist.barrier()
    os._exit(0)  # gloo's threads can abort a process that ends by Python's finalization


if __name__ == "__main__":
    main()
