"""Replaces the ranks that are gone and leaves the others as they are (client)."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nbdist.cluster import starting
from nbdist.cluster.death import tell_deaths
from nbdist.cluster.incidents import Incident, read_incidents
from nbdist.cluster.launch import Processes
from nbdist.cluster.link import WorldLink
from nbdist.cluster.objects import Objects
from nbdist.cluster.places import plan_places
from nbdist.cluster.replacing import start_processes
from nbdist.cluster.source import check_ranks
from nbdist.cluster.spares import ready_spares
from nbdist.errors import RankBusyError
from nbdist.messages import RankInfo, Shutdown, StatusQuery
from nbdist.runfiles import WorldRecord

__all__ = ["Healed", "Healing"]

POLL_SECONDS = 0.01
ENDED_ALONE = 75  # exit code of a rank that is ended while the others go on


@dataclass(frozen=True, slots=True, kw_only=True)
class Healed:
    """What `World.heal` has done.

    Attributes:
        deaths: how ranks that were lost had ended, in words.
        pushed: names that this client had pushed to the rank and has pushed again, by rank.
        gone: names that another rank has and the replaced one has no longer, by rank; None when
            no rank was left to compare with.
        group_seconds: how long it took until the new process group was verified.
        seconds: how long it took in all.
    """

    deaths: dict[int, str]
    pushed: dict[int, list[str]]
    gone: dict[int, list[str]] | None
    group_seconds: float
    seconds: float


class Healing:
    """The part of `World` that replaces ranks."""

    record: WorldRecord
    infos: list[RankInfo]
    last_heal: Healed | None = None
    _link: WorldLink
    _processes: Processes | None
    _generation: int
    _group_broken: bool
    _objects: Objects
    _lock: threading.Lock

    def heal(self, on_stage: Callable[[str], None] | None = None) -> list[int]:
        """Start a process for every lost rank; the others keep process and variables.

        All ranks then join a new process group, which is verified. What this client had pushed
        to a lost rank is pushed again, as it is now. `last_heal` tells what else is gone.

        Args:
            on_stage: is told in words what is done.

        Returns:
            The ranks that were replaced; empty when none was lost.

        Raises:
            RankBusyError: another rank runs a cell.
            StartError: a process did not come up; the other ranks are as they were.
        """
        return self._replace((), on_stage)

    def restart(
        self,
        ranks: Sequence[int] | str | None = None,
        on_stage: Callable[[str], None] | None = None,
    ) -> list[int]:
        """End the processes of ranks, None for all, and start new ones as `heal` does."""
        return self._replace(check_ranks(ranks, self.record.num_ranks), on_stage)

    @property
    def num_spares_ready(self) -> int:
        """How many processes wait to take the place of a lost rank."""
        return len(ready_spares(Path(self.record.directory)))

    @property
    def incidents(self) -> list[Incident]:
        """Deaths of ranks in cells that survive them, and what was done; the oldest first."""
        return read_incidents(Path(self.record.directory))

    def _replace(self, ranks: Sequence[int], on_stage: Callable[[str], None] | None) -> list[int]:
        self._check_alive(())
        started = time.monotonic()
        with self._lock:
            check_idle(self._link, self.record.num_ranks, ranks)
            lost = sorted(self._link.lost_ranks)
            deaths = tell_deaths(Path(self.record.directory), self.infos, lost)
            end_ranks(self._link, self.infos, ranks)
            lost = sorted(self._link.lost_ranks)
            if not lost:
                return []
            # Whatever stops this half-way: the next cell begins with a group of all ranks.
            self._group_broken = True
            processes = self._processes or Processes.of(self.record)
            tell = on_stage or (lambda _text: None)
            start_processes(processes, self._link, self.infos, lost, tell)
            tell("making and verifying the process group")
            self._remake_group()
            verified = time.monotonic()
            try:
                pushed, gone = _restore_names(self._objects, lost, self.record.num_ranks)
            finally:
                # Last: a spare that imports torch would slow down what the user waits for.
                processes.start_spares()
        self.last_heal = Healed(
            deaths=deaths,
            pushed=pushed,
            gone=gone,
            group_seconds=verified - started,
            seconds=time.monotonic() - started,
        )
        return lost

    def bring_up(self, ranks: Sequence[int], tell: Callable[[str], None]) -> None:
        """Bring up processes for lost ranks while a cell runs; see `Replacing`."""
        processes = self._processes or Processes.of(self.record)
        start_processes(processes, self._link, self.infos, ranks, tell)

    def give_up(self, ranks: Sequence[int]) -> None:
        """End what has come up for ranks; see `Replacing`."""
        end_ranks(self._link, (), ranks)
        for rank in ranks:
            self._link.give_up(rank)

    def regroup(self, gone: Collection[int]) -> int:
        """Have all ranks but these join the next generation while a cell runs; see `Replacing`."""
        self._group_broken = True
        ranks = [rank for rank in range(self.record.num_ranks) if rank not in gone]
        moves = plan_places(ranks, len(ranks)).moves
        self._remake_group(sorted(ranks, key=lambda rank: moves.get(rank, rank)))
        (self._processes or Processes.of(self.record)).start_spares()
        return self._generation

    def _check_alive(self, ranks: Sequence[int]) -> None:
        raise NotImplementedError

    def _remake_group(self, ranks: Sequence[int] | None = None) -> None:
        """Have ranks, None for all, join the generation after the last that any of them knows."""
        ranks = range(self.record.num_ranks) if ranks is None else ranks
        self._generation = self._last_generation(ranks) + 1
        self._note(starting.join_group(self._link, self.record, self._generation, ranks))
        self._group_broken = False

    def _last_generation(self, ranks: Sequence[int]) -> int:
        """Return the last generation that was begun, by whatever client."""
        query = StatusQuery(query_id=uuid.uuid4().hex)
        answers = starting.ask(self._link, query, ranks, timeout_seconds=2.0)
        known = [info.generation for info in answers.values()]
        # Ranks that are gone may have been in a later one, whose store is not used again.
        stores = Path(self.record.directory).glob("store.*")
        known += [int(store.suffix.removeprefix(".")) for store in stores]
        return max(self._generation, *known)

    def _note(self, joined: Sequence[RankInfo]) -> None:
        """Remember who ranks are that have joined a group."""
        infos = {info.rank: info for info in [*self.infos, *joined]}
        self.infos = [infos[rank] for rank in sorted(infos)]


def check_idle(link: WorldLink, num_ranks: int, but: Sequence[int]) -> None:
    """Raise RankBusyError when a rank that stays cannot join a new group now."""
    staying = sorted(set(range(num_ranks)) - link.lost_ranks - set(but))
    answers = starting.ask(link, StatusQuery(query_id=uuid.uuid4().hex), staying, 2.0)
    busy = [r for r in staying if r not in answers or answers[r].running_cell]
    if busy:
        raise RankBusyError(
            "ranks were to be replaced, or their number to change, for which the others join a new "
            f"process group, but rank {', '.join(map(str, busy))} runs a cell; wait, or "
            "`%distributed interrupt`"
        )


def end_ranks(link: WorldLink, infos: Sequence[RankInfo], ranks: Sequence[int]) -> None:
    """End the processes of ranks, whatever they run, and wait until they are gone."""
    going = set(ranks) - link.lost_ranks
    for rank in going:
        link.post(rank, Shutdown(exit_code=ENDED_ALONE))
    for patience_seconds in (2.0, 2.0):
        deadline = time.monotonic() + patience_seconds
        while going - link.lost_ranks and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        # A process that is stopped or holds its lock in native code does not answer.
        for info in infos:
            if info.rank in going - link.lost_ranks:
                with suppress(ProcessLookupError):
                    os.kill(info.pid, signal.SIGKILL)


def _restore_names(
    objects: Objects, lost: Sequence[int], num_ranks: int
) -> tuple[dict[int, list[str]], dict[int, list[str]] | None]:
    """Push again what was pushed to ranks; return these names, and those that stay gone."""
    from nbdist.rank.namespace import user_names

    pushed = {rank: objects.push_again(rank) for rank in lost}
    alive = [rank for rank in range(num_ranks) if rank not in lost]
    if not alive:
        return pushed, None
    present = dict(
        zip([alive[0], *lost], objects.apply(user_names, (), [alive[0], *lost]), strict=True)
    )
    return pushed, {rank: sorted(set(present[alive[0]]) - set(present[rank])) for rank in lost}
