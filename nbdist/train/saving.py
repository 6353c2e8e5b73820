"""When to save, and writing in the background: one save at a time, told when it fails (ranks)."""

from __future__ import annotations

import threading
import time
import warnings
from concurrent.futures import Future
from concurrent.futures import wait as wait_until_done
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from nbdist.errors import CheckpointError
from nbdist.train import checkpoint

if TYPE_CHECKING:
    from nbdist.train.checkpoint import Snapshot

__all__ = ["CheckpointConfig", "Saver"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Where and how often to save; the end of a run is always saved.

    Attributes:
        directory: seen by all ranks; made if missing.
        every_steps: steps between saves; None saves by time alone.
        every_minutes: minutes after which a step is saved, counted from the last save; None saves
            by steps alone.
        keep_last: checkpoints kept; older ones are deleted after a save.
        keep_every: checkpoints whose step is a multiple of it are kept for good.
        async_save: a thread copies the state and writes it. One save at a time. The copy must be
            there before the weights change, so a step waits for it before its update. The memory
            of that copy, in the host, is kept for the next one.
        on_save_error: what a save that was due and failed does: "warn" tells it and trains on,
            "stop" ends `fit` with the CheckpointError.
        save_on_stop: save the step after which Ctrl-C has stopped `Trainer.fit`, too.
    """

    directory: str | Path
    every_steps: int | None = None
    every_minutes: float | None = 30.0
    keep_last: int = 3
    keep_every: int | None = None
    async_save: bool = True
    on_save_error: Literal["warn", "stop"] = "warn"
    save_on_stop: bool = True

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep_last", "keep_every"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"CheckpointConfig got {name}={value}; set {name} >= 1")
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise ValueError(
                f"CheckpointConfig got every_minutes={self.every_minutes}; set it above 0, or "
                "None to save by steps alone"
            )
        if self.on_save_error not in ("warn", "stop"):
            raise ValueError(
                f"CheckpointConfig got on_save_error={self.on_save_error!r}; set 'warn' or 'stop'"
            )


class Saver:
    """Writes the checkpoints of a trainer.

    What is written in the background goes through a process group of its own, so that it never
    mixes with the collectives of a step.

    Weights and the optimizer's state change in the optimizer's step alone. A thread copies them
    while the next step computes its gradients; that step calls `before_update`, which waits. As a
    context manager it waits at the end, too: who comes next may change the weights.

    Args:
        config: None when the run saves nothing.

    Attributes:
        stall_seconds: how long the last save has held up the training: in `save` and in
            `before_update`. What its threads take from the step on a busy host is not in it.
    """

    def __init__(self, config: CheckpointConfig | None) -> None:
        self._config = config
        self._running: Future[Path] | None = None
        self._staged: Future[None] | None = None
        self._group: dist.ProcessGroup | None = None
        self._stager: DefaultStager | None = None
        self._saved_at = time.monotonic()
        self.stall_seconds = 0.0

    def wishes(self) -> tuple[bool, bool]:
        """Return whether this rank's clock says that a save is due, and whether one has failed.

        The ranks' answers differ; they are made one by the sum of each step.
        """
        minutes = self._config.every_minutes if self._config else None
        due = minutes is not None and time.monotonic() - self._saved_at > 60 * minutes
        running = self._running
        failed = running is not None and running.done() and running.exception() is not None
        return due, failed

    def is_due(self, step: int, *, ends: bool) -> bool:
        """Return whether to save a step: by its number, or if configured at all, because `ends`."""
        if self._config is None:
            return False
        every = self._config.every_steps
        return ends or (every is not None and step % every == 0)

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint, in the background as configured. Collective over: the default group.

        Returns its path, which is complete after `settle`. Waits for the save before it.

        Raises:
            CheckpointError: it could not be written; or, as configured, the one before it.
        """
        started = time.monotonic()
        self.settle()
        self._saved_at = started
        if self._config is None or not self._config.async_save:
            path = checkpoint.write(snapshot)
        else:
            path = snapshot.final
            self._start(snapshot)
        self.stall_seconds = time.monotonic() - started
        return path

    def _start(self, snapshot: Snapshot) -> None:
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        if self._stager is None:
            # kept: the pages of a new copy would cost more than the copying
            self._stager = DefaultStager(StagingOptions(False, False, False, False))
        # forward changes buffers, so these are copied here and now
        changing = self._copied(snapshot.changing())
        staged, result = self._staged, self._running = Future[None](), Future["Path"]()

        def work() -> None:
            try:
                snapshot.replace_state(changing, self._copied(snapshot.steady_part()))
            except BaseException as error:  # noqa: BLE001 - raised again by `before_update`
                result.set_exception(error)
                staged.set_exception(error)
                return
            staged.set_result(None)
            try:
                result.set_result(checkpoint.write(snapshot, self._group))
            except BaseException as error:  # noqa: BLE001 - raised again by `wait`, on the main thread
                result.set_exception(error)

        # a daemon: a rank that is told to end does not wait for its peers
        threading.Thread(target=work, name="nbdist-save", daemon=True).start()

    def _copied(self, state: dict[str, Any]) -> dict[str, Any]:
        assert self._stager is not None, "made before the first copy"
        staged = self._stager.stage(state)
        assert isinstance(staged, dict), "staging without a thread of its own returns the copy"
        return staged

    def before_update(self) -> None:
        """Wait until the state of the last save is copied; weights may change after that.

        Not collective. Raises what the copying has raised, such as MemoryError.
        """
        if self._staged is None:
            return
        started = time.monotonic()
        try:
            self._staged.result()
        finally:
            # a Stop in here leaves the copy unfinished: `__exit__` waits for it
            if self._staged.done():
                self._staged = None
        self.stall_seconds += time.monotonic() - started

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        if self._staged is not None:
            wait_until_done([self._staged])  # what it has raised is told by whoever asks next

    def wait(self) -> Path | None:
        """Wait for the running save and return its path; None when there is none.

        Raises:
            CheckpointError: it could not be written.
        """
        self.before_update()
        running, self._running = self._running, None
        if running is None:
            return None
        try:
            return running.result()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint that was being written is not complete: {error}; the ones before "
                "it are untouched; save again"
            ) from error

    def settle(self) -> None:
        """Wait for the running save; its failure is told or raised as configured."""
        with self.tolerant():
            self.wait()

    def tolerant(self) -> Tolerance:
        """Return a context that turns a failed save into a warning, if so configured."""
        return Tolerance(is_on=self._config is not None and self._config.on_save_error == "warn")


class Tolerance:
    """Turns a CheckpointError into a warning of rank 0."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not self._is_on or not isinstance(error, CheckpointError):
            return False
        if dist.get_rank() == 0:
            warnings.warn(f"{error}; training goes on", RuntimeWarning, stacklevel=3)
        return True
