"""Replaces ranks that die in a cell which survives that, while the cell goes on (client)."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from nbdist.cluster.death import tell_deaths
from nbdist.cluster.incidents import Incident, note_incident, read_incidents
from nbdist.cluster.link import WorldLink
from nbdist.errors import NbdistError, RankLostError, StartError
from nbdist.messages import AbortGroup, CanRecover, CellNote, RankInfo, Recovered, RunCell

__all__ = ["Recovering", "Replacing"]

_DOING = {"heal": "it is being replaced", "shrink": "the others go on without it"}
# The link knows of a death at once; the thread of the cell first shows what came before.
NEWS_SECONDS = 2.0
POLL_SECONDS = 0.01

_NEVER = CanRecover(rank=-1, cell_id="", seq=0, on_failure="")


class Replacing(Protocol):
    """What is needed of a world."""

    infos: list[RankInfo]

    def bring_up(self, ranks: Sequence[int], tell: Callable[[str], None]) -> None:
        """Bring up processes for lost ranks; return when they take cells."""
        ...

    def give_up(self, ranks: Sequence[int]) -> None:
        """End what has come up for lost ranks: they are to be lost."""
        ...

    def regroup(self, gone: Collection[int]) -> int:
        """Have all ranks but these join the next generation of the group; return its number."""
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
        gone: ranks that the cell goes on without, until its end under the others' old numbers.
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
        self.gone: set[int] = set()
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
    def _members(self) -> set[int]:
        return set(self._request.ranks) - self.gone

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
        if self.is_busy and set(self._recovered) >= self._members:
            self._end("shrunk" if self.gone & set(self._deaths) else "healed")

    def takes_over(self, rank: int) -> bool:
        """Begin to replace a rank that has died; False when the cell has to end."""
        policies = [self._ready.get(r, _NEVER) for r in self._members]
        policy = policies[0]
        alive = self._members - self._link.lost_ranks - {rank}
        if not all(one.on_failure for one in policies) or not alive or self.failure is not None:
            return False
        if not self._deaths:
            recent = read_incidents(self._directory, within_seconds=3600 * policy.per_hours)
            if len(recent) >= policy.max_failures:
                text = f"{len(recent)} failures within {policy.per_hours:g} h: not survived again"
                self._say(text, ranks=(rank,))
                return False
            self._began = time.monotonic()
            self._times = {}
        # Before all else: the others wait for this word, and how the rank died may come late.
        self._post(AbortGroup(generation=self.generation, heals=True))
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
        policy = next(iter(self._ready.values()))
        self._new |= set(lost)
        self._post(AbortGroup(generation=self.generation, heals=True))
        who = ", ".join(map(str, sorted(self._deaths)))
        self._say(
            f"rank {who} died: {'; '.join(self._deaths.values())}; {_DOING[policy.on_failure]}"
        )
        gone = set(self.gone)
        try:
            if policy.on_failure == "shrink":
                gone |= self._without(lost, policy)
            else:
                gone |= self._bring_up(lost, who, policy)
            self._times.setdefault("replaced", time.monotonic() - self._began)
            self.generation = self._world.regroup(gone)
            self.gone = gone
        except RankLostError:
            if not self._are_more_lost():  # else they are replaced in the next round
                raise
            return True
        self._times["group"] = time.monotonic() - self._began
        call = next(iter(self._ready.values())).call
        for rank in sorted(self._new):
            self._link.post(rank, dataclasses.replace(self._request, rejoin=call))
        self._new.clear()
        done = "left out" if gone & set(lost) else "replaced"
        self._say(f"rank {who} was {done}; the ranks restore and compare their state")
        return True

    def _are_more_lost(self) -> bool:
        """Return whether ranks have died since; the thread of the cell may not have said so yet."""
        deadline = time.monotonic() + NEWS_SECONDS
        while not self._lost and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return bool(self._lost)

    def _bring_up(self, lost: list[int], who: str, policy: CanRecover) -> set[int]:
        """Replace ranks; return those that are to be done without, as no process came up."""
        try:
            self._world.bring_up(lost, lambda text: self._say(f"rank {who} died; {text}"))
        except StartError as error:
            without = self._without(lost, policy, error)
            self._world.give_up(lost)
            return without
        return set()

    def _without(
        self, lost: list[int], policy: CanRecover, cause: StartError | None = None
    ) -> set[int]:
        """Return the ranks to do without.

        Raises:
            NbdistError: too few ranks would be left.
        """
        left = len(self._members - set(lost))
        if left < policy.min_ranks or left % policy.multiple_of:
            wants = f"at least min_ranks={policy.min_ranks}"
            if policy.multiple_of > 1:
                wants += f", and a multiple of tp * pp * cp * ep = {policy.multiple_of}"
            text = f"{left} ranks are left, but the run needs {wants}"
            raise NbdistError(f"{cause}; {text}" if cause else text) from cause
        self._new -= set(lost)
        return set(lost)

    def _fail(self, error: NbdistError) -> None:
        self._post(AbortGroup(generation=self.generation))
        self._end(f"not survived: {error}")
        self.failure = error
        self._thread = None

    def _post(self, message: AbortGroup) -> None:
        for rank in self._members - self._link.lost_ranks:
            with suppress(RankLostError):
                self._link.post(rank, message)

    def _end(self, outcome: str) -> None:
        told = list(self._recovered.values())
        at = time.time() - (time.monotonic() - self._began)
        incident = Incident(
            at=at,
            deaths=dict(sorted(self._deaths.items())),
            outcome=outcome,
            freed_seconds=max((one.freed_at - at for one in told if one.freed_at), default=0.0),
            num_ranks=len(self._members),
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
        if incident.is_survived:
            self._deaths = {}

    def _say(self, text: str, ranks: tuple[int, ...] = ()) -> None:
        self._notes.put(CellNote(cell_id=self._request.cell_id, text=text, ranks=ranks))
