"""Replaces ranks that die in a cell which survives that, while the cell goes on (client)."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from nbdist.cluster.death import tell_deaths
from nbdist.cluster.incidents import Incident, note_incident, read_incidents
from nbdist.cluster.link import WorldLink
from nbdist.errors import NbdistError, RankLostError
from nbdist.messages import AbortGroup, CanRecover, CellNote, RankInfo, Recovered, RunCell

__all__ = ["Recovering", "Replacing"]

_NEVER = CanRecover(rank=-1, cell_id="", seq=0, on_failure="")


class Replacing(Protocol):
    """What is needed of a world."""

    infos: list[RankInfo]

    def bring_up(self, ranks: Sequence[int], tell: Callable[[str], None]) -> None:
        """Bring up processes for lost ranks; return when they take cells."""
        ...

    def regroup(self, ranks: Sequence[int]) -> int:
        """Have ranks join the next generation of the process group and return its number."""
        ...


class Recovering:
    """Follows one cell. Its methods are called by the thread that runs the cell.

    Args:
        directory: of the world.
        link: to the ranks.
        request: the cell.
        generation: of the process group.
        world: brings up processes.

    Attributes:
        generation: that the ranks are in, or are joining.
        failure: why lost ranks were not replaced; None while all goes well.
    """

    def __init__(
        self,
        directory: Path,
        link: WorldLink,
        request: RunCell,
        generation: int,
        world: Replacing,
    ) -> None:
        self._directory, self._link, self._request = directory, link, request
        self._world = world
        self.generation = generation
        self.failure: NbdistError | None = None
        self._ready: dict[int, CanRecover] = {}
        self._lost: list[int] = []
        self._deaths: dict[int, str] = {}
        self._new: set[int] = set()
        self._recovered: dict[int, Recovered] = {}
        self._times: dict[str, float] = {}
        self._began = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._notes: queue.SimpleQueue[CellNote] = queue.SimpleQueue()

    @property
    def is_busy(self) -> bool:
        """Whether ranks are being replaced, or have not all said that they go on."""
        return bool(self._deaths) and self.failure is None

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks that no process runs the cell for: to be told of after a failure."""
        gone = self._link.lost_ranks | self._new
        return sorted(gone & set(self._deaths))

    def take(self, event: CanRecover | Recovered) -> None:
        """Note what a rank says."""
        if isinstance(event, CanRecover):
            self._ready[event.rank] = event
            return
        self._recovered[event.rank] = event
        if self.is_busy and set(self._recovered) >= set(self._request.ranks):
            self._end("healed")

    def takes_over(self, rank: int) -> bool:
        """Begin to replace a rank that has died; False when the cell has to end."""
        policies = [self._ready.get(r, _NEVER) for r in self._request.ranks]
        policy = policies[0]
        alive = set(self._request.ranks) - self._link.lost_ranks - {rank}
        if not all(one.on_failure for one in policies) or not alive or self.failure is not None:
            return False
        if not self._deaths:
            recent = read_incidents(self._directory, within_seconds=3600 * policy.per_hours)
            if len(recent) >= policy.max_failures:
                text = f"{len(recent)} failures within {policy.per_hours:g} h: not healed again"
                self._say(text, ranks=(rank,))
                return False
            self._began = time.monotonic()
            self._times = {}
        with self._lock:
            self._recovered.clear()
            self._lost.append(rank)
            self._deaths |= tell_deaths(self._directory, self._world.infos, [rank])
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="nbdist-recover")
                self._thread.start()
        return True

    def give_up(self, rank: int) -> None:
        """Note that a rank has ended its cell instead of going on: it tells why itself."""
        if self.is_busy:
            self._fail(NbdistError(f"rank {rank} could not go on"))

    def note(self) -> CellNote | None:
        """Return what the user should know of it, one piece at a time."""
        return None if self._notes.empty() else self._notes.get()

    def close(self) -> None:
        """Wait until nothing is started any more."""
        if (thread := self._thread) is not None:
            thread.join()

    def _work(self) -> None:
        try:
            while self._replace_lost():
                pass
        except NbdistError as error:
            self._fail(error)

    def _replace_lost(self) -> bool:
        """Replace what has been lost up to now; False when nothing is left to do."""
        with self._lock:
            lost, self._lost = self._lost, []
            if not lost:
                self._thread = None
                return False
        self._new |= set(lost)
        self._post(AbortGroup(generation=self.generation, heals=True))
        who = ", ".join(map(str, sorted(self._deaths)))
        self._say(f"rank {who} died: {'; '.join(self._deaths.values())}; it is being replaced")
        try:
            self._world.bring_up(lost, lambda text: self._say(f"rank {who} died; {text}"))
            self._times.setdefault("replaced", time.monotonic() - self._began)
            self.generation = self._world.regroup(sorted(self._request.ranks))
        except RankLostError:
            if not self._lost:  # else it was one that is replaced in the next round
                raise
            return True
        self._times["group"] = time.monotonic() - self._began
        call = next(iter(self._ready.values())).call
        for rank in sorted(self._new):
            self._link.post(rank, dataclasses.replace(self._request, rejoin=call))
        self._new.clear()
        self._say(f"rank {who} was replaced; the ranks restore and compare their state")
        return True

    def _fail(self, error: NbdistError) -> None:
        self._post(AbortGroup(generation=self.generation))
        self._end(f"not healed: {error}")
        self.failure = error
        self._thread = None

    def _post(self, message: AbortGroup) -> None:
        for rank in set(self._request.ranks) - self._link.lost_ranks:
            with suppress(RankLostError):
                self._link.post(rank, message)

    def _end(self, outcome: str) -> None:
        told = list(self._recovered.values())
        incident = Incident(
            at=time.time() - (time.monotonic() - self._began),
            deaths=dict(sorted(self._deaths.items())),
            outcome=outcome,
            replaced_seconds=self._times.get("replaced", 0.0),
            group_seconds=self._times.get("group", 0.0),
            seconds=time.monotonic() - self._began,
            step=told[0].step if told else -1,
            steps_lost=max((one.steps_lost for one in told), default=0),
            source=told[0].source if told else "",
            missing=tuple(sorted({name for one in told for name in one.missing})),
        )
        note_incident(self._directory, incident)
        self._say(incident.in_words(), ranks=tuple(incident.deaths))
        if incident.is_healed:
            self._deaths = {}

    def _say(self, text: str, ranks: tuple[int, ...] = ()) -> None:
        self._notes.put(CellNote(cell_id=self._request.cell_id, text=text, ranks=ranks))
