"""An engine on weights that are being trained (rank)."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from nbdist.serve.resident import bare_model, named_weights
from nbdist.serve.weights import LiveWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from nbdist.messages import EngineStats
    from nbdist.serve.engine import Engine, EngineRequest, TokenOutput

__all__ = ["EngineAround", "LiveEngine", "live_weights", "with_cost"]


class EngineAround:
    """An engine that hands all calls on to another one; implements `Engine`."""

    def __init__(self, engine: Engine) -> None:
        self.name = engine.name
        self.limits = engine.limits
        self._engine = engine

    @property
    def num_requests(self) -> int:
        """See `Engine.num_requests`."""
        return self._engine.num_requests

    def submit(self, request: EngineRequest) -> None:
        """See `Engine.submit`."""
        self._engine.submit(request)

    def cancel(self, request_id: str) -> bool:
        """See `Engine.cancel`."""
        return self._engine.cancel(request_id)

    def step(self) -> list[TokenOutput]:
        """See `Engine.step`."""
        return self._engine.step()

    def wait_seconds(self) -> float | None:
        """See `Engine.wait_seconds`."""
        return self._engine.wait_seconds()

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return self._engine.stats()

    def new_version(self) -> None:
        """See `Engine.new_version`."""
        self._engine.new_version()

    def close(self) -> None:
        """See `Engine.close`."""
        self._engine.close()


class LiveEngine(EngineAround):
    """Steps of an engine between updates of its weights; a new version of them voids its cache.

    Args:
        engine: runs a model.
        weights: that are trained; those of the model, or those that it was copied from.
    """

    def __init__(self, engine: Engine, weights: LiveWeights) -> None:
        super().__init__(engine)
        self.weights = weights
        self._is_turn = False

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let the training thread call `step` between two updates."""
        self._is_turn = True
        try:
            yield
        finally:
            self._is_turn = False

    def dismissal(self) -> Callable[[], None]:
        """Return what ends the turns."""
        return self.weights.close

    def step(self) -> list[TokenOutput]:
        """See `Engine.step`; nothing is done while it must wait for the end of an update."""
        if not self._is_turn and self.weights.wait_seconds() > 0:
            return []
        with self.weights.gate.serving():
            if self.weights.changed():
                self._engine.new_version()
            return self._engine.step()

    def wait_seconds(self) -> float | None:
        """See `Engine.wait_seconds`."""
        wait = self._engine.wait_seconds()
        if wait is None or self._is_turn:
            return wait
        return max(wait, self.weights.wait_seconds())

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return with_cost(self._engine.stats(), self.weights)

    def close(self) -> None:
        """See `Engine.close`."""
        self.weights.close()
        super().close()


def live_weights(model: nn.Module, *, share: bool, turns: bool) -> LiveWeights | None:
    """Return what watches the updates of `model`; None where nobody need know."""
    if not share and not turns:
        return None
    parameters = [tensor for _, tensor in named_weights(bare_model(model))]
    return LiveWeights(parameters, is_shared=share, between_steps=turns)


def with_cost(stats: EngineStats, weights: LiveWeights) -> EngineStats:
    """Return the numbers of an engine with what its training has paid for it."""
    return dataclasses.replace(
        stats,
        num_updates=weights.num_updates,
        held_seconds=weights.held_seconds,
        training_seconds=weights.training_seconds,
    )
