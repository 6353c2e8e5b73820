"""Lower precision, loss scaling and determinism of a run (ranks)."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

__all__ = ["AUTOCAST", "LossScale", "autocast", "deterministic"]

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Names that `TrainConfig.autocast_dtype` may have."""


def autocast(dtype: str | None, device: torch.device) -> torch.autocast:
    """Return the context of forward and loss: matrix products in `dtype`, weights as they are."""
    return torch.autocast(
        device.type, dtype=AUTOCAST.get(dtype or "", torch.bfloat16), enabled=dtype is not None
    )


class LossScale:
    """The factor that keeps float16 gradients from vanishing; 1 with other dtypes.

    It halves after a step whose gradient is not finite, which is left out, and doubles after
    `growth_steps` good ones. The norm of the whole gradient decides, so all ranks decide alike;
    torch's GradScaler looks at a rank's own gradients only.

    Args:
        enabled: whether gradients come from float16.
        growth_steps: good steps between doublings.
    """

    def __init__(self, *, enabled: bool, growth_steps: int = 2000) -> None:
        self.enabled = enabled
        self.value = 2.0**16 if enabled else 1.0
        self._growth_steps = growth_steps
        self._good_steps = 0

    @property
    def state(self) -> tuple[float, int] | None:
        """The factor and the good steps since it fell, for a checkpoint; None when disabled."""
        return (self.value, self._good_steps) if self.enabled else None

    def restore(self, state: Sequence[float] | None) -> None:
        """Go on from `state`; None, from a run without a factor, begins anew."""
        if not self.enabled:
            return
        value, good_steps = state or (2.0**16, 0)
        self.value, self._good_steps = float(value), int(good_steps)

    def notes(self) -> list[float]:
        """Return `state` as plain numbers."""
        return [self.value, float(self._good_steps)]

    def take_notes(self, notes: list[float]) -> None:
        """Set the state that `notes` returned."""
        self.value, self._good_steps = notes[0], int(notes[1])

    def accept(self, norm: Tensor) -> bool:
        """Return whether to take the step, and set the factor for the next one.

        Args:
            norm: of the whole gradient, equal on all ranks.
        """
        if not self.enabled:
            return True
        if not bool(torch.isfinite(norm)):
            self.value /= 2
            self._good_steps = 0
            return False
        self._good_steps += 1
        if self._good_steps % self._growth_steps == 0:
            self.value *= 2
        return True


@contextmanager
def deterministic(*, enabled: bool) -> Iterator[None]:
    """Let torch use only operators that give the same result every time.

    An operator that has none raises RuntimeError, which names it.
    """
    if not enabled:
        yield
        return
    # read by cuBLAS when it starts; without it, its matrix products would raise
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.benchmark = benchmark
