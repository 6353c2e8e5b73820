"""What a trainer does so that its run survives the death of a rank (ranks)."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Self

import torch.distributed as dist

from nbdist.errors import CheckpointError, NbdistError
from nbdist.ports import Policy, SurvivalPort, current_port
from nbdist.train.mesh import num_fixed
from nbdist.train.survival.mirror import Mirror
from nbdist.train.survival.packing import NAMESPACE
from nbdist.train.survival.recipe import (
    Recipe,
    known_objects,
    pack_trainer,
    unpack_trainer,
    why_not_rebuilt,
)
from nbdist.train.survival.recovery import go_on, go_on_resized, share

if TYPE_CHECKING:
    from types import TracebackType

    from nbdist.train.data import TrainData
    from nbdist.train.metrics import TrainHistory
    from nbdist.train.survival.reshard import Copies
    from nbdist.train.trainer import Trainer

__all__ = ["NewRank", "Survival"]

_log = logging.getLogger(__name__)

# What a peer's death makes of a collective, or of a save that was under way.
_FAILURES = (RuntimeError, CheckpointError)


class Survival:
    """Keeps copies while a trainer runs, and brings it back after a failure.

    Entered around the steps of `fit`. Does nothing with `on_failure="stop"`, on a single rank, or
    in a process that nobody can replace.

    Args:
        trainer: whose run it is.
        data: its whole data set.

    Attributes:
        copies: states to go on from with another number of ranks; see `nbdist.train.moving`.
    """

    failures = _FAILURES

    def __init__(self, trainer: Trainer, data: TrainData) -> None:
        self._trainer = trainer
        self.data = data
        self._port: SurvivalPort | None = None
        self._mirror: Mirror | None = None
        self._micro_rows: int | None = None
        self.copies: Copies = {}

    @property
    def micro_rows(self) -> int:
        """Most rows of a micro-batch, as on the ranks that the trainer was made on."""
        if self._micro_rows is None:
            config, (_, num_ranks) = self._trainer.config, self._trainer.data_place
            most = math.ceil(config.global_batch_size / num_ranks)
            self._micro_rows = math.ceil(most / config.accumulation_steps)
        return self._micro_rows

    @micro_rows.setter
    def micro_rows(self, rows: int) -> None:
        self._micro_rows = rows

    def __enter__(self) -> Self:
        config = self._trainer.config
        if config.on_failure == "stop" or dist.get_world_size() == 1:
            return self
        self._port = current_port()
        if self._port is None:
            _log.warning(
                "on_failure=%r was asked for, but this process is no rank of a World: nobody can "
                "put a new one in its place; a failure ends the run",
                config.on_failure,
            )
            return self
        _check_can_build(self._trainer, self.data, self._port)
        policy = Policy(
            on_failure=config.on_failure,
            min_ranks=config.min_ranks,
            multiple_of=num_fixed(self._trainer.mesh),
            max_failures=config.max_failures,
            per_hours=config.per_hours,
        )
        problem = self._port.begin(policy)
        if problem:
            self._port = None
            if dist.get_rank() == 0:
                _log.warning("a rank's death will end this cell: %s", problem)
            return self
        if self._mirror is None:
            self._mirror = Mirror(self._trainer.model, self._trainer.optimizer, self._trainer.mesh)
            self._mirror.take(self._trainer.step, self._trainer.notes())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._port is not None:
            self._port.end()
        self._port, self._mirror = None, None

    def settle(self) -> None:
        """Wait for the copy that is under way; before a collective of every step."""
        if self._mirror is not None:
            self._mirror.settle()

    def step_done(self) -> None:
        """Begin a copy of the state, if one is due. Collective over: the default group."""
        trainer = self._trainer
        if self._mirror is not None and trainer.step % trainer.config.mirror_every == 0:
            self._mirror.take(trainer.step, trainer.notes())

    def recover(self, error: BaseException) -> None:
        """Go on after a failure, with new ranks in the place of dead ones, or without these.

        Collective over: all ranks of the group that follows.

        Raises:
            BaseException: `error`, when no rank has died, or it is not to be replaced.
            NbdistError: there is nothing to go on from.
        """
        if self._port is None or self._mirror is None:
            raise error
        trainer, before = self._trainer, self._trainer.step
        self._mirror.abandon()
        while True:
            self._port.wait_for_group(error)
            try:
                self._rebuild(before)
            except RuntimeError as again:  # another rank has died meanwhile
                error = again
            else:
                break
        self._port.recovered(
            step=trainer.step, steps_lost=max(before - trainer.step, 0), source=self._source
        )

    def _rebuild(self, before: int) -> None:
        trainer, port = self._trainer, self._port
        assert port is not None, "checked by the caller"
        old = known_objects(trainer, self.data) | {NAMESPACE: port.namespace}
        assert self._mirror is not None, "checked by the caller"
        recipe = Recipe.of(trainer, self.data)
        if self._mirror.world_size != dist.get_world_size():
            recipe = recipe.for_world(dist.get_world_size())
        packed = lambda: (pack_trainer(recipe, trainer, port.namespace), port.pack_names(old))  # noqa: E731
        share(packed)
        trainer.config = recipe.config
        trainer.assemble(*recipe.build())
        if recipe.is_resized:
            outcome = go_on_resized(trainer, self._mirror.copies())
        else:
            outcome = go_on(trainer, self._mirror, before)
        self._mirror, self._source = outcome.mirror, outcome.source
        trainer.history.forget_after(outcome.step)
        new = known_objects(trainer, self.data)
        port.rebind([(old[name], new[name]) for name in ("model", "bare", "optimizer", "mesh")])
        trainer.finish_step()

    def take_over(self, mirror: Mirror, port: SurvivalPort) -> None:
        """Begin with the copies that a new rank has made."""
        self._mirror, self._port = mirror, port


class NewRank:
    """A process in the place of a dead rank, which goes on with the others' run.

    Args:
        port: of this process.
    """

    def __init__(self, port: SurvivalPort) -> None:
        self._port = port
        self._trainer: Trainer | None = None

    def join(self) -> None:
        """Build what the others have and take the state. Collective over: all ranks.

        Raises:
            NbdistError: as `go_on`.
            RuntimeError: the group broke, and nobody makes it anew.
        """
        while True:
            try:
                self._build()
            except RuntimeError as error:  # another rank has died meanwhile
                self._port.wait_for_group(error)
            else:
                return

    def go_on(self) -> TrainHistory:
        """Train to the end and return the history, as `fit` does on the others."""
        assert self._trainer is not None, "has joined before"
        return self._trainer.go_on()

    def _build(self) -> None:
        packed, names = share(None)
        namespace = self._port.namespace
        trainer, recipe = unpack_trainer(packed, namespace)
        # Before anything of the user's runs, such as the loss: it looks its names up.
        known = known_objects(trainer, recipe.data) | {NAMESPACE: namespace}
        self._port.unpack_names(names, known)
        outcome = go_on_resized(trainer, {}) if recipe.is_resized else go_on(trainer, None, 0)
        trainer.history.forget_after(outcome.step)
        trainer.survival.take_over(outcome.mirror, self._port)
        trainer.finish_step()
        self._port.recovered(step=outcome.step, steps_lost=0, source=outcome.source)
        self._trainer = trainer


def _check_can_build(trainer: Trainer, data: TrainData, port: SurvivalPort) -> None:
    """Raise NbdistError now, when a new rank could not be given what it needs."""
    if found := why_not_rebuilt(trainer, data, port.namespace):
        raise NbdistError(
            f"on_failure={trainer.config.on_failure!r} was asked for, but model, data and "
            f"settings could not be given to a new rank: {found}; let them be pickled, give "
            'Trainer a whole model or one from parallelize(), or set on_failure="stop"'
        )
