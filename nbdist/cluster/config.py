"""How a world is started (client)."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, fields

__all__ = ["WorldConfig", "default_num_ranks", "count_gpus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """Settings of `World.start`.

    Attributes:
        num_ranks: number of ranks; None takes one per GPU, else one per two cores, at least 2.
        keep: let the world outlive this client; `attach` finds it again.
        timeout_seconds: longest time the start may take.
        collective_timeout_seconds: when a collective on the ranks gives up waiting.
        mpi_command: the MPI launcher, such as `/opt/mpi/bin/mpirun`; None finds one.
        threads_per_rank: threads torch computes with; None divides the host's cores.
        interface: network address the ranks listen on. Loopback reaches this host only.
        spares: processes that wait, with torch imported, to take the place of a rank that dies.
    """

    num_ranks: int | None = None
    keep: bool = False
    timeout_seconds: float = 120.0
    collective_timeout_seconds: float = 1800.0
    mpi_command: str | None = None
    threads_per_rank: int | None = None
    interface: str = "127.0.0.1"
    spares: int = 0

    def __post_init__(self) -> None:
        if self.num_ranks is not None and (
            isinstance(self.num_ranks, bool)
            or not isinstance(self.num_ranks, int)
            or self.num_ranks < 1
        ):
            raise ValueError(
                f"num_ranks={self.num_ranks!r} is not a number of ranks; give an integer of at "
                "least 1, such as `-n 2`, or leave it out"
            )
        if isinstance(self.spares, bool) or not isinstance(self.spares, int) or self.spares < 0:
            raise ValueError(
                f"spares={self.spares!r} is not a number of processes; give 0 or more, such as "
                "`--spares 1`"
            )
        for name in ("timeout_seconds", "collective_timeout_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be more than 0 seconds")

    @classmethod
    def of(cls, **settings: object) -> WorldConfig:
        """Build a config; an unknown setting is named with those that exist."""
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(settings) - set(known)):
            raise ValueError(f"World.start has no setting {unknown}; it has {known}")
        return cls(**settings)  # type: ignore[arg-type]


def count_gpus() -> int:
    """Return how many NVIDIA GPUs this process may use, without loading torch or CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    done = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def default_num_ranks() -> int:
    """Return one rank per GPU, else one per two cores with at least 2."""
    return count_gpus() or max(2, len(os.sched_getaffinity(0)) // 2)
