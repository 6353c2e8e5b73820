"""How long each phase of a step took on this rank (ranks)."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd import Variable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["Clock", "Phase", "PhaseClock", "mark_backward_end"]


class Phase(StrEnum):
    """What a rank does in a step."""

    DATA = "data"
    """Reading the rows and copying them to the device."""
    FORWARD = "forward"
    """Forward and loss; a pipeline's backward, too, as its two interleave."""
    BACKWARD = "backward"
    """Backward, without the wait for other ranks at its end."""
    COMMUNICATION = "communication"
    """Waiting in collectives. What runs behind computation costs nothing and does not count."""
    OPTIMIZER = "optimizer"
    """Clipping and the update."""
    SAVE = "save"
    """Checkpoints and copies for peers, as far as training waits for them."""


class Clock(Protocol):
    """Is told where phases end."""

    def mark(self, phase: Phase | None) -> None:
        """Say that the time since the last mark belonged to a phase; to none with None."""
        ...


class PhaseClock:
    """Measures the phases of one step after the other.

    On a GPU by events on its stream, read once the device is done anyway. There the time in
    collectives within a phase is part of that phase: the host does not see it.

    Args:
        device_type: of the model.
        waited: returns the seconds that this thread has waited in collectives so far; they are
            taken out of each phase. None when nobody knows.
        now: returns the time in seconds.
    """

    def __init__(
        self,
        device_type: str,
        waited: Callable[[], float] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._on_gpu = device_type == "cuda"
        self._waited = waited if waited is not None and not self._on_gpu else lambda: 0.0
        self._now = now
        self._marks: list[tuple[Phase | None, Any, float]] = []

    def begin(self) -> list[float] | None:
        """Begin a step; return the seconds of the last one by phase, None before the first."""
        before = self._seconds() if len(self._marks) > 1 else None
        self._marks = []
        self.mark(None)
        return before

    def mark(self, phase: Phase | None) -> None:
        """See `Clock.mark`; outside of steps nothing is measured."""
        if phase is not None and not self._marks:
            return
        if self._on_gpu:
            at: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            at.record()
        else:
            at = self._now()
        self._marks.append((phase, at, self._waited()))

    def _seconds(self) -> list[float]:
        spent = dict.fromkeys(Phase, 0.0)
        if self._on_gpu:
            self._marks[-1][1].synchronize()
        for (_, start, waited_then), (phase, end, waited) in zip(
            self._marks, self._marks[1:], strict=False
        ):
            if phase is not None:
                took = start.elapsed_time(end) / 1000 if self._on_gpu else end - start
                spent[phase] += took - (waited - waited_then)
                spent[Phase.COMMUNICATION] += waited - waited_then
        return list(spent.values())


def mark_backward_end(loss: Tensor, clock: Clock) -> None:
    """Mark the end of backward's computation, before DDP waits for the other ranks.

    Autograd calls what was queued in backward, in that order, when all gradients are there. DDP
    queues its wait with its last bucket, so this is queued before.

    Args:
        loss: whose backward follows.
        clock: is told.
    """
    if loss.requires_grad:
        loss.register_hook(  # type: ignore[no-untyped-call]
            lambda _: Variable._execution_engine.queue_callback(lambda: clock.mark(Phase.BACKWARD))
        )
