"""One cell on its way through the ranks: events up, the ladder that ends it (client)."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nbdist.cluster.link import WorldLink
from nbdist.cluster.watch import Watch
from nbdist.errors import (
    CellTimeoutError,
    CollectiveMismatchError,
    CollectiveSubsetError,
    RankBusyError,
    RankLostError,
    RemoteCellError,
)
from nbdist.messages import (
    AbortGroup,
    Interrupt,
    Message,
    RankDisplay,
    RankDone,
    RankError,
    RankStream,
    RunCell,
)

__all__ = ["CellResult", "CellRun"]

# After a rank has failed the others wait for nothing that will come; after a stop they may be
# at the end of a training step, which leaves a consistent state.
GRACE_SECONDS = {"failure": 0.5, "stop": 1.5}
GIVE_UP_SECONDS = 5.0
TICK_SECONDS = 0.05


@dataclass(slots=True)
class CellResult:
    """What a cell gave back, by rank.

    Attributes:
        text: what the rank wrote to stdout and stderr, up to its limit.
        displays: contents of the rank's Jupyter display messages, in order.
        seconds: how long the cell ran on the rank.
    """

    text: dict[int, str]
    displays: dict[int, list[dict[str, Any]]]
    seconds: dict[int, float] = field(default_factory=dict)
    _pieces: dict[int, list[str]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, ranks: Sequence[int]) -> CellResult:
        """Return an empty result of these ranks."""
        return cls(text=dict.fromkeys(ranks, ""), displays={rank: [] for rank in ranks})

    def add(self, event: Message) -> None:
        """Take in one event of the cell."""
        if isinstance(event, RankStream):
            pieces = self._pieces.setdefault(event.rank, [])
            if event.left_out:
                pieces.append(f"\n... {event.left_out} characters are only in the rank's log ...\n")
            pieces.append(event.text)
            if event.rank in self.seconds:
                self._join(event.rank)
        elif isinstance(event, RankDisplay):
            self.displays[event.rank].append(event.content)
        elif isinstance(event, RankDone):
            self.seconds[event.rank] = event.seconds
            self._join(event.rank)

    def _join(self, rank: int) -> None:
        self.text[rank] += "".join(self._pieces.pop(rank, []))


class CellRun:
    """A running cell.

    When a rank fails, the client wants to stop, or time is up, the other ranks are ended in
    steps: first they are left a moment, then interrupted, then freed from their collectives.

    Args:
        link: to the ranks.
        request: the cell.
        generation: of the process group, as the client knows it.
        timeout_seconds: longest time the cell may run; None for no limit.
        watch: looks for waits that cannot end.
    """

    def __init__(
        self,
        link: WorldLink,
        request: RunCell,
        generation: int,
        timeout_seconds: float | None,
        watch: Watch,
    ) -> None:
        self._link = link
        self._request = request
        self._generation = generation
        self._timeout = timeout_seconds
        self._watch = watch
        self._hopeless: CollectiveSubsetError | None = None
        self._events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._waiting = set(request.ranks)
        self._errors: list[RankError] = []
        self._endings: dict[int, RankDone] = {}
        self._rung_at = 0.0
        self._rung = 0
        self._stopped = False
        self._timed_out = False
        self.group_aborted = False

    def start(self) -> None:
        """Send the cell to its ranks."""
        self._link.listen(self._request.cell_id, lambda _rank, event: self._events.put(event))
        self._started = time.monotonic()
        for rank in self._request.ranks:
            self._link.post(rank, self._request)

    def events(self) -> Generator[Message | None, None, None]:
        """Yield the cell's events until it has ended on every rank; None when time passes.

        A KeyboardInterrupt, raised here or thrown in, stops the ranks; the events that they
        still send are yielded before it goes on.
        """
        try:
            while self._waiting:
                try:
                    event = self._next()
                    yield event
                except KeyboardInterrupt:
                    self.stop()
        except GeneratorExit:
            self.stop()
            while self._waiting:
                self._next()
            raise
        finally:
            self._watch.close()
            self._link.listen(self._request.cell_id, None)
        while not self._events.empty():
            # A thread of the cell has written more since.
            yield self._events.get()
        if self._stopped:
            raise KeyboardInterrupt

    @property
    def _grace(self) -> float:
        return GRACE_SECONDS["stop" if self._stopped else "failure"]

    def stop(self) -> None:
        """Ask every rank to stop; asked again, free them from collectives without waiting."""
        self._stopped = True
        self._climb()

    def _next(self) -> Message | None:
        if not self._rung_at:
            try:
                if (note := self._watch.look()) is not None:
                    return note
            except CollectiveSubsetError as error:
                self._hopeless = error
                self._climb()
        try:
            event = self._events.get(timeout=TICK_SECONDS)
        except queue.Empty:
            self._tick()
            return None
        if isinstance(event, RankError):
            self._errors.append(event)
            # What a peer has sent already lies in the group's connections: it is not used again.
            self.group_aborted |= event.name == CollectiveMismatchError.__name__
        elif isinstance(event, RankDone):
            self._endings[event.rank] = event
            self._waiting.discard(event.rank)
            if event.status in ("error", "lost", "busy") and not self._rung_at:
                self._rung_at = time.monotonic()
        return event

    def _tick(self) -> None:
        now = time.monotonic()
        if self._timeout and now - self._started > self._timeout and not self._timed_out:
            self._timed_out = True
            self._climb()
        elif self._rung_at and now - self._rung_at > self._grace and self._rung < 2:
            self._climb()
        elif self._rung == 2 and now - self._rung_at > GIVE_UP_SECONDS:
            self._rung = 3
            self._waiting.clear()

    def _climb(self) -> None:
        """Take the next step against the ranks that still run the cell."""
        self._rung = min(self._rung + 1, 2)
        self._rung_at = time.monotonic()
        waiting = sorted(self._waiting - self._link.lost_ranks)
        if self._rung == 1:
            for rank in waiting:
                self._link.post(rank, Interrupt(cell_id=self._request.cell_id))
            return
        self.group_aborted = True
        for rank in waiting:
            self._link.post(rank, AbortGroup(generation=self._generation))

    def raise_for_failure(self, lost_error: Callable[[Sequence[int], str], RankLostError]) -> None:
        """Raise the one error of the cell, first cause on top; return when all ranks were ok.

        Args:
            lost_error: makes the error of lost ranks from a sentence about `{ranks}`.
        """
        by_status: dict[str, list[int]] = {}
        for rank, done in sorted(self._endings.items()):
            by_status.setdefault(done.status, []).append(rank)
        if lost := by_status.get("lost"):
            raise lost_error(lost, "rank {ranks} died while the cell ran")
        if self._hopeless is not None:
            raise self._hopeless
        if busy := by_status.get("busy"):
            raise RankBusyError(
                f"the cell was not run: rank {', '.join(map(str, busy))} still runs cell "
                f"{self._endings[busy[0]].detail}; wait for it, or `%distributed interrupt`"
            )
        first = sorted(self._errors, key=lambda e: e.at_seconds)
        if first and not (self._timed_out and not by_status.get("error")):
            others = {e.rank: _after(e) for e in first if e.rank != first[0].rank}
            raise RemoteCellError(
                first[0].rank, first[0].name, first[0].value, first[0].traceback, others
            )
        if self._timed_out:
            raise CellTimeoutError(
                f"the cell ran longer than --timeout {self._timeout:g} seconds and was stopped; "
                "variables are kept; give it more time, or none (no --timeout)"
            )
        if silent := sorted(set(self._request.ranks) - set(self._endings)):
            raise RankBusyError(
                f"rank {', '.join(map(str, silent))} did not stop within "
                f"{GIVE_UP_SECONDS:g} s of being interrupted: it is inside code that cannot be "
                "stopped; `%distributed status` shows when it is idle again"
            )


def _after(error: RankError) -> str:
    """Return in words how a rank ended after another one had failed."""
    stopped = error.name in ("KeyboardInterrupt", "CancelledError")
    return "was stopped" if stopped else f"raised {error.name}: {error.value.splitlines()[0]}"
