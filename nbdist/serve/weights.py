"""Weights that are trained while they are served: whose turn it is, and which version (rank).

Nothing is asked of the trainer: torch calls the hooks here around every `Optimizer.step`.
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nbdist.errors import ServeError
from nbdist.serve.gate import Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["LiveWeights"]

_PATIENCE_STEPS = 5.0
_PATIENCE_SECONDS = 1.0


class LiveWeights:
    """Knows when the weights of a model are written.

    Args:
        parameters: those that optimizers write, sharded or not.
        is_shared: whether the served model is made of them; else only the end of updates matters.
        between_steps: whether steps wait for the end of an update while the model is trained. It
            is while updates come: until none has come for five times the last interval between
            two, or a second.
        clock: monotonic seconds.

    Attributes:
        gate: held by steps and updates in turn.
        num_updates: optimizer steps since this was made.
        held_seconds: how long those had to wait for serving.
        after_update: called on the training thread when an update has ended.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        is_shared: bool,
        between_steps: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gate = Gate(clock)
        self.num_updates = 0
        self.held_seconds = 0.0
        self.after_update: Callable[[], None] | None = None
        self.is_shared = is_shared
        self.between_steps = between_steps
        self._clock = clock
        # weakly: who serves a copy keeps no model alive
        self._parameters = {id(p): weakref.ref(p) for p in parameters}
        self._places = self._where()
        self._seen = self._state()
        self._first_update = self._last_update = self._interval = 0.0
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    @property
    def training_seconds(self) -> float:
        """From the end of the first update to that of the last one."""
        return self._last_update - self._first_update

    def changed(self) -> bool:
        """Return whether the weights were written since this was last asked; in a serving turn.

        Counts what optimizers do and what else writes in place, such as a checkpoint's load.

        Raises:
            ServeError: they were given other memory.
        """
        if not self.is_shared:
            return False
        if any(self._places[key] != place for key, place in self._where().items()):
            raise ServeError(
                "the served model shares its weights with one that is trained, whose weights were "
                "moved to other memory, by `model.to(...)` or the like; call `serve` again"
            )
        seen, self._seen = self._seen, self._state()
        return seen != self._seen

    def wait_seconds(self) -> float:
        """Return how long no step may begin by itself; 0 when it may now."""
        if not self.between_steps or not self.num_updates:
            return 0.0
        patience = max(_PATIENCE_SECONDS, _PATIENCE_STEPS * self._interval)
        return max(0.0, self._last_update + patience - self._clock())

    def close(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self.after_update = None

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self.is_shared and self._is_ours(optimizer):
            self.held_seconds += self.gate.begin_update(sys._getframe(1))

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_ours(optimizer):
            return
        now = self._clock()
        if self.num_updates:
            self._interval = now - self._last_update
        else:
            self._first_update = now
        self._last_update = now
        self.num_updates += 1
        self.gate.end_update()
        if self.after_update is not None:
            self.after_update()
            self.held_seconds += self._clock() - now

    def _is_ours(self, optimizer: Optimizer) -> bool:
        alive = self._alive()
        return any(
            alive.get(id(p)) is p for group in optimizer.param_groups for p in group["params"]
        )

    def _alive(self) -> dict[int, Tensor]:
        found = {key: known() for key, known in self._parameters.items()}
        return {key: parameter for key, parameter in found.items() if parameter is not None}

    def _where(self) -> dict[int, int]:
        return {key: _place(parameter) for key, parameter in self._alive().items()}

    def _state(self) -> tuple[int, int]:
        return self.num_updates, sum(p._version for p in self._alive().values())


def _place(parameter: Tensor) -> int:
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return local.data_ptr()
