"""Where the time of a run goes, on all ranks (ranks).

A rank's times of a step ride on the sum of the losses of the next one: no collective of its own.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import cache
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist

from nbdist.ports import current_wait_clock
from nbdist.train.mfu import flops_per_token, peak_flops
from nbdist.train.phases import Phase, PhaseClock
from nbdist.train.stragglers import Straggler, find_straggler, typical

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from nbdist.train.config import TrainConfig

__all__ = ["Timing"]

_log = logging.getLogger(__name__)
_WAIT = list(Phase).index(Phase.COMMUNICATION)
_MIB = float(2**20)


class Timing:
    """Times and memory of the last steps, equal on all ranks; shows itself as a table.

    Args:
        device_type: of the model.
        flops: returns the FLOPs of a token in a row of so many; None when they are not known.
        peak: FLOP/s of this rank's device; None when it is not known.
        num_steps: steps that are kept; a slow rank is looked for after every so many.
        ratio: of a slow rank's own work to that of the others.
        waited: as in `PhaseClock`.

    Attributes:
        clock: of this rank.
        straggler: the rank that the others wait for, as last found; None for none.
        memory_bytes: by rank: most that the GPU's tensors took, or what the process takes now.
    """

    def __init__(
        self,
        device_type: str,
        *,
        flops: Callable[[int], float | None],
        peak: float | None,
        num_steps: int,
        ratio: float,
        waited: Callable[[], float] | None = None,
    ) -> None:
        self.clock = PhaseClock(device_type, waited)
        self.straggler: Straggler | None = None
        self.memory_bytes: list[int] = []
        self._flops, self._peak = cache(flops), peak
        self._on_gpu = device_type == "cuda"
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._num_steps, self._ratio = num_steps, ratio
        self._steps: deque[list[list[float]]] = deque(maxlen=num_steps)
        self._num_taken = 0
        self._told: list[float] | None = None
        self._process = psutil.Process()

    @classmethod
    def of(cls, model: nn.Module, config: TrainConfig, device: torch.device) -> Timing:
        """Return the timing of a trainer; measures a CPU's peak once a process."""
        weights = next(model.parameters(), torch.zeros(0)).dtype
        dtype = getattr(torch, config.autocast_dtype) if config.autocast_dtype else weights
        return cls(
            device.type,
            flops=lambda num_tokens: flops_per_token(model, num_tokens),
            peak=peak_flops(device, dtype),
            num_steps=config.straggler_steps,
            ratio=config.straggler_ratio,
            waited=current_wait_clock(),
        )

    def mfu(self, tokens_per_second: float, tokens_per_row: int) -> float | None:
        """Return the share of all ranks' peak, this rank's times their number, that is used."""
        flops = self._flops(tokens_per_row)
        if flops is None or self._peak is None:
            return None
        return tokens_per_second * flops / (self._peak * self._num_ranks)

    def begin(self) -> None:
        """Begin a step."""
        self._told = self.clock.begin()

    def told(self) -> list[float]:
        """Return this rank's part of what is summed: zeros, and its own row of the step before."""
        width = len(Phase) + 1
        row = [*self._told, self._memory() / _MIB] if self._told else [0.0] * width
        zeros = [0.0] * width
        return zeros * self._rank + row + zeros * (self._num_ranks - 1 - self._rank)

    def take(self, summed: list[float]) -> None:
        """Take the sum over all ranks of what `told` returned."""
        if not any(summed):
            return  # the first step of a run has none before it
        width = len(Phase) + 1
        rows = [summed[at : at + width] for at in range(0, len(summed), width)]
        self.memory_bytes = [int(row[-1] * _MIB) for row in rows]
        self._steps.append([row[:-1] for row in rows])
        self._num_taken += 1
        if self._num_taken % self._num_steps == 0:
            self._look()

    @property
    def seconds(self) -> list[dict[Phase, float]]:
        """What a step usually takes, by rank and phase; empty without steps."""
        usual = typical(list(self._steps))
        return [dict(zip(Phase, phases, strict=True)) for phases in usual]

    @property
    def communication(self) -> float:
        """Share of the time, over all ranks and kept steps, spent waiting in collectives."""
        spent = sum(sum(row) for step in self._steps for row in step)
        waited = sum(row[_WAIT] for step in self._steps for row in step)
        return waited / spent if spent else 0.0

    def glance(self) -> str:
        """Return the last step and the slow rank in a few words, for the progress line."""
        if not self._steps:
            return ""
        own = [(sum(row) - row[_WAIT]) * 1e3 for row in self._steps[-1]]
        words = [f"{max(self.memory_bytes) / 2**30:.2f} GiB"]
        if self._num_ranks > 1:
            words.append(f"work {min(own):,.0f}-{max(own):,.0f} ms")
            words.append(f"communication {self.communication:.0%}")
        if self.straggler:
            words.append(f"slow: rank {self.straggler.rank} ({self.straggler.phase})")
        return ", ".join(words)

    def __repr__(self) -> str:
        if not self._steps:
            return "Timing(no steps)"
        head = f"{'ms a step':>9}" + "".join(f"{phase:>15}" for phase in Phase) + f"{'GiB':>8}"
        lines = [
            f"{f'rank {rank}':>9}"
            + "".join(f"{seconds * 1e3:15,.2f}" for seconds in phases.values())
            + f"{self.memory_bytes[rank] / 2**30:8.2f}"
            for rank, phases in enumerate(self.seconds)
        ]
        last = [f"communication {self.communication:.1%}"]
        last += [str(self.straggler)] if self.straggler else []
        return "\n".join([head, *lines, "; ".join(last)])

    def _memory(self) -> int:
        if self._on_gpu:
            return torch.cuda.max_memory_allocated()
        return int(self._process.memory_info().rss)

    def _look(self) -> None:
        found = find_straggler(typical(list(self._steps)), self._ratio)
        before = self.straggler
        self.straggler = found
        if self._rank != 0:
            return
        if found and (before is None or (before.rank, before.phase) != (found.rank, found.phase)):
            _log.warning("%s", found)
        elif before and not found:
            _log.warning("rank %d is no longer slow", before.rank)
