"""A group of ranks that runs one trial after the other (client)."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nbdist.cluster.cell import CellRun
from nbdist.cluster.link import WorldLink
from nbdist.cluster.recovering import Recovering, Replacing
from nbdist.cluster.watch import Watch
from nbdist.errors import NbdistError, RankLostError, StartError
from nbdist.messages import Message, RunCell, TrialCall, TrialEnded, TrialReply

__all__ = ["Objective", "RankGroup", "SearchWorld"]

NEWS_SECONDS = 2.0
POLL_SECONDS = 0.01
TEXT_LIMIT = 10_000  # nobody sees it here; the rank's log has all

_SOURCE = '__import__("nbdist.rank.trials", fromlist=["*"]).run_trial({search!r}, {number})'


class SearchWorld(Replacing, Protocol):
    """What is needed of a world; the methods may be called by several threads."""

    def join_part(self, ranks: Sequence[int]) -> int:
        """Have some ranks be a process group of their own; return its generation."""
        ...

    def replace_lost(self, ranks: Sequence[int]) -> None:
        """Bring up processes for those of some ranks that are lost; they are in no group yet."""
        ...

    def end_stuck(self, ranks: Sequence[int]) -> None:
        """End the processes of ranks that wait for one that has died."""
        ...

    def call_idle(self, fn: Callable[..., Any], args: tuple[Any, ...], rank: int) -> None:
        """Call a function on an idle rank."""
        ...

    def push_again(self, rank: int) -> None:
        """Set on a new process of a rank what was pushed to the old one."""
        ...

    def lost_error(self, ranks: Sequence[int], text: str) -> RankLostError:
        """Return the error of lost ranks, from a sentence about `{ranks}`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is run for a trial.

    Attributes:
        search: name of the search.
        packed: the function, pickled.
        timeout_seconds: longest time of a trial; None for no limit.
    """

    search: str
    packed: bytes
    timeout_seconds: float | None


class RankGroup:
    """Some ranks of a world. All but `stop` are called by the group's own thread.

    Each trial runs on a new process group: what an earlier one has left broken, or not closed,
    goes with the old one.

    Args:
        world: of the ranks.
        link: to them.
        directory: of the world.
        ranks: of the group.
        objective: of all trials.
    """

    def __init__(
        self,
        world: SearchWorld,
        link: WorldLink,
        directory: Path,
        ranks: tuple[int, ...],
        objective: Objective,
    ) -> None:
        self.ranks = ranks
        self._world, self._link, self._directory = world, link, directory
        self._objective = objective
        self._informed: set[int] = set()  # ids of processes that have the objective
        self._new: set[int] = set()  # ranks whose process is new
        self._run: CellRun | None = None
        self._is_stopped = False
        self._lock = threading.Lock()

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        whole = self.ranks == tuple(range(first, last + 1)) and first != last
        return f"{first}-{last}" if whole else ",".join(map(str, self.ranks))

    def heal(self) -> None:
        """Replace those of its ranks that are lost.

        Raises:
            StartError: a process did not come up.
        """
        lost = self._lost()
        if lost and not self._is_stopped:
            self._world.replace_lost(self.ranks)
            self._new |= lost

    def run(self, number: int, answer: Callable[[TrialCall], TrialReply]) -> TrialEnded:
        """Run a trial and return how the objective has ended.

        Args:
            number: of the trial.
            answer: returns the answer to a call of the objective.

        Raises:
            RankLostError: a rank has died.
            NbdistError: the ranks cannot run it, for another reason.
            RemoteCellError: the objective has raised.
            CellTimeoutError: it took longer than the limit.
            KeyboardInterrupt: it was stopped.
        """
        generation = self._join()
        self._inform()
        request = RunCell(
            cell_id=uuid.uuid4().hex,
            source=_SOURCE.format(search=self._objective.search, number=number),
            ranks=self.ranks,
            text_limit=TEXT_LIMIT,
        )
        run = self._begin(request, generation)
        ended = None
        try:
            for event in run.events():
                if isinstance(event, TrialCall):
                    with suppress(RankLostError):  # the trial itself tells of it
                        self._link.post(event.rank, answer(event))
                elif isinstance(event, TrialEnded) and event.rank == self.ranks[0]:
                    ended = event
        finally:
            self._run = None
        run.raise_for_failure(self._world.lost_error)
        if ended is None:
            raise NbdistError(f"rank {self.ranks[0]} ended trial {number} without its result")
        return ended

    def stop(self) -> None:
        """End the trial that runs, from another thread; asked again, at once."""
        with self._lock:
            self._is_stopped = True
            if self._run is not None:
                self._run.stop()

    def _join(self) -> int:
        """Have the ranks join a process group of their own; return its generation.

        Raises:
            RankLostError: one of them has died.
            NbdistError: they cannot for another reason.
        """
        self._check_alive()
        try:
            return self._world.join_part(self.ranks)
        except (StartError, RankLostError) as error:
            deadline = time.monotonic() + NEWS_SECONDS  # the others may hear of a death first
            while not self._lost() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            if self._lost():
                # They look for its address as long as a collective may take, and hear nothing.
                self._world.end_stuck([rank for rank in self.ranks if rank not in self._lost()])
            self._check_alive()
            raise NbdistError(f"they could not join a process group: {error}") from error

    def _lost(self) -> frozenset[int]:
        return self._link.lost_ranks & set(self.ranks)

    def _check_alive(self) -> None:
        if lost := sorted(self._lost()):
            raise self._world.lost_error(lost, "rank {ranks} died when a trial was to begin")

    def _begin(self, request: RunCell, generation: int) -> CellRun:
        watch = Watch(self._link, request, max(self.ranks) + 1)
        recovering = Recovering(self._directory, self._link, request, generation, self._world)
        limit = self._objective.timeout_seconds
        with self._lock:
            if self._is_stopped:
                watch.close()
                raise KeyboardInterrupt
            self._run = _TrialRun(self._link, request, limit, watch, recovering)
            self._run.start()
            return self._run

    def _inform(self) -> None:
        """Send to processes what they do not have: pushed names, the objective."""
        from nbdist.rank.trials import take_objective

        while self._new:
            self._world.push_again(self._new.pop())
        args = (self._objective.search, self._objective.packed)
        for info in self._world.infos:
            if info.rank in self.ranks and info.pid not in self._informed:
                self._world.call_idle(take_objective, args, info.rank)
                self._informed.add(info.pid)


class _TrialRun(CellRun):
    """A trial: the deaths of its own ranks end it, also in code that would survive them."""

    def _hear(self, rank: int, event: Message) -> None:
        if rank in self._request.ranks:
            super()._hear(rank, event)

    def _is_taken_over(self, event: Message) -> bool:
        return False
