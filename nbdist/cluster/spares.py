"""Has processes that wait for it take the places of lost ranks (client)."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nbdist import keeper
from nbdist.cluster import starting
from nbdist.cluster.link import WorldLink
from nbdist.messages import TakePlace
from nbdist.runfiles import WorldRecord

__all__ = ["Spare", "ready_spares", "take_places"]

TAKE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """A process that waits for a place; `path` is the file by which it has said so."""

    path: Path
    pid: int
    started: float
    endpoint: str

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return keeper.is_alive(self.pid, self.started)

    def end(self) -> None:
        """End the process."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def ready_spares(directory: Path) -> list[Spare]:
    """Return the spares of a world that could take a place now."""
    spares = []
    for path in sorted((directory / "spares").glob("[!.]*.json")):
        with suppress(FileNotFoundError):  # another client takes it
            spares.append(Spare(path=path, **json.loads(path.read_text())))
    return [spare for spare in spares if spare.is_alive]


def take_places(
    record: WorldRecord, link: WorldLink, local_ranks: dict[int, int]
) -> dict[int, Spare]:
    """Connect to spares as ranks, as far as there are some, and wait until they take cells.

    Args:
        record: of the world.
        link: to its ranks.
        local_ranks: `{rank: local rank}` of the lost ranks.

    Returns:
        `{rank: spare}`; empty when one of them did not answer, then all of them have ended.
    """
    taken: dict[int, Spare] = {}
    deadline = time.monotonic() + TAKE_SECONDS

    def check(waiting: set[int]) -> None:
        if waiting & link.lost_ranks or time.monotonic() > deadline:
            raise TimeoutError

    try:
        for rank, local_rank in local_ranks.items():
            if (spare := _claim(record)) is None:
                break
            taken[rank] = spare
            link.connect(rank, spare.endpoint)
            link.post(
                rank, TakePlace(rank=rank, local_rank=local_rank, world_size=record.num_ranks)
            )
        starting.wait_until_registered(link, list(taken), check)
    except BaseException as error:
        # Failed or stopped: a half-made rank must never come up behind the next heal's.
        for rank, spare in taken.items():
            spare.end()
            link.give_up(rank)
        if not isinstance(error, TimeoutError):
            raise
        return {}
    return taken


def _claim(record: WorldRecord) -> Spare | None:
    """Take a spare away from every other client; None when there is none."""
    for spare in ready_spares(Path(record.directory)):
        with suppress(FileNotFoundError):
            spare.path.unlink()
            record.refresh()
            record.spares.pop(spare.path.stem, None)
            record.save()
            return spare
    return None
