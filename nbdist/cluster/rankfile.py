"""What a rank has written about itself into the world's directory (client)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from nbdist import keeper
from nbdist.messages import RankInfo

__all__ = ["RankFile", "read_rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """`ranks/RANK.json`; `started` is the start time of the process in clock ticks since boot."""

    rank: int
    endpoint: str
    pid: int
    started: float
    local_rank: int
    host: str

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs; told on its own host."""
        return keeper.is_alive(self.pid, self.started)

    def info(self, world_size: int) -> RankInfo:
        """Return what is known of a rank that cannot answer."""
        return RankInfo(
            rank=self.rank,
            world_size=world_size,
            local_rank=self.local_rank,
            host=self.host,
            pid=self.pid,
            device="",
        )


def read_rank(directory: Path, rank: int) -> RankFile | None:
    """Return what a rank has written last; None while it has written nothing."""
    path = directory / "ranks" / f"{rank}.json"
    if not path.exists():
        return None
    return RankFile(**json.loads(path.read_text()))
