"""Which rank holds the others up, and in which phase (ranks)."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from nbdist.train.phases import Phase

__all__ = ["Straggler", "find_straggler", "typical"]

_WAIT = list(Phase).index(Phase.COMMUNICATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that the others wait for.

    Attributes:
        rank: which.
        phase: where it loses most.
        own_seconds: of its work in a step, waiting left out.
        usual_seconds: the same of the other ranks, their median.
        phase_seconds: of that phase.
        usual_phase_seconds: the same of the other ranks, their median.
    """

    rank: int
    phase: Phase
    own_seconds: float
    usual_seconds: float
    phase_seconds: float
    usual_phase_seconds: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: {self.own_seconds * 1e3:,.1f} ms of work a step, the other "
            f"ranks need {self.usual_seconds * 1e3:,.1f} ms and wait for it; it loses most in "
            f"{self.phase}: {self.phase_seconds * 1e3:,.1f} ms instead of "
            f"{self.usual_phase_seconds * 1e3:,.1f} ms"
        )


def typical(steps: list[list[list[float]]]) -> list[list[float]]:
    """Return the usual seconds a step by rank and phase.

    The median over the steps that had the phase, times their share: one odd step changes nothing,
    and a save in every tenth step counts by a tenth.

    Args:
        steps: seconds by step, rank and phase.
    """
    usual = []
    for of_rank in zip(*steps, strict=True):
        phases = []
        for of_phase in zip(*of_rank, strict=True):
            had = [seconds for seconds in of_phase if seconds > 0]
            phases.append(statistics.median(had) * len(had) / len(of_phase) if had else 0.0)
        usual.append(phases)
    return usual


def find_straggler(usual: list[list[float]], ratio: float) -> Straggler | None:
    """Return the slowest rank if its own work takes `ratio` times that of the others, or longer.

    Args:
        usual: seconds by rank and phase, from `typical`.
        ratio: above 1.
    """
    if len(usual) < 2:
        return None
    own = [sum(phases) - phases[_WAIT] for phases in usual]
    rank = max(range(len(own)), key=own.__getitem__)
    others = [index for index in range(len(own)) if index != rank]
    usual_own = statistics.median(own[index] for index in others)
    if own[rank] <= ratio * usual_own:
        return None
    medians = [statistics.median(usual[index][p] for index in others) for p in range(len(Phase))]
    lost = [-1.0 if p == _WAIT else seconds - medians[p] for p, seconds in enumerate(usual[rank])]
    worst = max(range(len(lost)), key=lost.__getitem__)
    return Straggler(
        rank=rank,
        phase=list(Phase)[worst],
        own_seconds=own[rank],
        usual_seconds=usual_own,
        phase_seconds=usual[rank][worst],
        usual_phase_seconds=medians[worst],
    )
