"""One cell on its way through the ranks: events up, the ladder that ends it (client)."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Generator, Sequence

from nbdist.cluster.ending import remote_error
from nbdist.cluster.ladder import GIVE_UP_SECONDS, Ladder
from nbdist.cluster.link import WorldLink, lost_event
from nbdist.cluster.pausing import Pause, Wanted, refuse
from nbdist.cluster.recovering import Recovering
from nbdist.cluster.watch import Watch
from nbdist.errors import (
    CellTimeoutError,
    CollectiveMismatchError,
    CollectiveSubsetError,
    RankBusyError,
    RankLostError,
)
from nbdist.messages import (
    AbortGroup,
    CanRecover,
    CellNote,
    Interrupt,
    Message,
    PauseSite,
    RankDone,
    RankError,
    RankFailed,
    Recovered,
    RunCell,
    StopDeferred,
)

__all__ = ["CellRun"]

TICK_SECONDS = 0.05
DEFERRED = (
    "the ranks stop together after the running step; Stop again ends them at once, perhaps "
    "inside it"
)


class CellRun:
    """A running cell.

    When a rank fails, the client wants to stop, or time is up, the other ranks are ended in
    steps: first they are left a moment, then interrupted, then freed from their collectives.

    Args:
        link: to the ranks.
        request: the cell.
        timeout_seconds: longest time the cell may run; None for no limit.
        watch: looks for waits that cannot end.
        recovering: replaces ranks that die, in a cell that survives it.

    Attributes:
        pause: how it stops to go on later; None when nobody asks for that.
    """

    def __init__(
        self,
        link: WorldLink,
        request: RunCell,
        timeout_seconds: float | None,
        watch: Watch,
        recovering: Recovering,
    ) -> None:
        self._link = link
        self._request = request
        self._recovering = recovering
        self._timeout = timeout_seconds
        self._watch = watch
        self._hopeless: CollectiveSubsetError | None = None
        self._events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._waiting = set(request.ranks)
        self._errors: list[RankError] = []
        self._endings: dict[int, RankDone] = {}
        self._ladder = Ladder()
        self._deferral_told = False
        self._stopped = False
        self._timed_out = False
        self.group_aborted = False
        self.pause: Pause | None = None

    def start(self) -> None:
        """Send the cell to its ranks."""
        self._link.listen(self._request.cell_id, self._hear)
        self._started = time.monotonic()
        for rank in self._request.ranks:
            self._link.post(rank, self._request)

    def _hear(self, _rank: int, event: Message) -> None:
        """Take an event from the link's thread, and the news of any rank that is lost."""
        self._events.put(event)

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
            if self.pause is not None and not self.pause.is_over:
                self.pause.refuse("it has ended")
            self._watch.close()
            self._recovering.close()
            self._link.listen(self._request.cell_id, None)
        while not self._events.empty():
            # A thread of the cell has written more since.
            yield self._events.get()
        if self._stopped:
            raise KeyboardInterrupt(*self._last_words())

    @property
    def gone(self) -> set[int]:
        """Ranks that the cell has gone on without."""
        return self._recovering.gone

    def pause_for(self, wanted: Wanted) -> None:
        """Have it stop inside `fit()`, from another thread; the answer may be that it does not."""
        if self.pause is not None and not self.pause.is_refused:
            refuse(wanted, "another change is under way")
        else:
            self.pause = Pause(self._link, self._request, wanted)

    def tell(self, text: str) -> None:
        """Show a remark under the cell, from any thread."""
        note = CellNote(cell_id=self._request.cell_id, text=text, ranks=self._request.ranks[:1])
        self._events.put(note)

    def _last_words(self) -> list[str]:
        """Return what a rank has said of its stop, as a trainer does; all say the same."""
        stops = (error for error in self._errors if error.name == KeyboardInterrupt.__name__)
        return [error.value for error in stops if error.value][:1]

    def stop(self) -> None:
        """Ask every rank to stop; asked again, end what it does, a training step too, at once."""
        if self._stopped:
            self._post_to_waiting(Interrupt(cell_id=self._request.cell_id))
        if self.pause is not None:
            self.pause.refuse("it was stopped")
        self._stopped = True
        self._ladder.ask()
        self._climb()

    def _next(self) -> Message | None:
        if (note := self._recovering.note() or self._look()) is not None:
            return note
        self._waiting -= self._recovering.gone
        try:
            event = self._events.get(timeout=TICK_SECONDS)
        except queue.Empty:
            return self._tick()
        if isinstance(event, StopDeferred):
            self._ladder.take_deferral(event.rank)
        elif isinstance(event, CanRecover | Recovered):
            self._recovering.take(event)
        elif self.pause is not None and isinstance(event, PauseSite):
            self.pause.take(event)
        elif self.pause is not None and not self._stopped and self.pause.takes(event):
            if isinstance(event, RankDone):
                self._waiting.discard(event.rank)
        elif not self._is_taken_over(event):
            self._take(event)
            return event
        return None

    def _look(self) -> Message | None:
        """Look for waits that cannot end, while nothing else has happened to the ranks."""
        if self._ladder.is_climbing or self._recovering.is_busy:
            return None
        try:
            return self._watch.look()
        except CollectiveSubsetError as error:
            self._hopeless = error
            self._climb()
        return None

    def _is_taken_over(self, event: Message) -> bool:
        if not isinstance(event, RankDone) or event.status != "lost" or self._stopped:
            return False
        return self._recovering.takes_over(event.rank)

    def _take(self, event: Message) -> None:
        if isinstance(event, RankError):
            self._errors.append(event)
            # What a peer has sent already lies in the group's connections: it is not used again.
            self.group_aborted |= event.name == CollectiveMismatchError.__name__
        elif isinstance(event, RankFailed):
            self._ladder.take_failure(event.rank, time.monotonic())
        elif isinstance(event, RankDone):
            if event.status != "ok":
                self._recovering.give_up(event.rank)
            self._endings[event.rank] = event
            self._waiting.discard(event.rank)
            self._take_end(event.status, time.monotonic())

    def _take_end(self, status: str, now: float) -> None:
        if status == "interrupted" and not self._ladder.is_climbing:
            # Another client has stopped the cell, on all of its ranks.
            self._stopped = True
            self._ladder.ask()
            self._ladder.climb(now)
        self._ladder.take_end(now, failed=status in ("error", "lost", "busy"))

    def _tick(self) -> CellNote | None:
        """Do what the time asks for; return what the user should know of it."""
        now = time.monotonic()
        if self._recovering.is_busy:
            return None
        if self._recovering.failure is not None:
            for rank in self._waiting & set(self._recovering.lost_ranks):
                self._waiting.discard(rank)
                self._endings[rank] = lost_event(rank, self._request.cell_id)
                self._take_end("lost", now)
        if self._timeout and now - self._started > self._timeout and not self._timed_out:
            self._timed_out = True
            self._ladder.ask()
            self._climb()
        elif self._ladder.is_due(self._waiting, now):
            self._climb()
        elif self._ladder.is_hopeless(now):
            self._waiting.clear()
        elif self._ladder.is_deferred(self._waiting, now) and not self._deferral_told:
            self._deferral_told = True
            return CellNote(cell_id=self._request.cell_id, text=DEFERRED)
        return None

    def _climb(self) -> None:
        """Take the next step against the ranks that still run the cell."""
        if self._ladder.climb(time.monotonic()) == 1:
            self._post_to_waiting(Interrupt(cell_id=self._request.cell_id))
        else:
            self.group_aborted = True
            self._post_to_waiting(AbortGroup(generation=self._recovering.generation))

    def _post_to_waiting(self, message: Message) -> None:
        running = self._waiting - self._link.lost_ranks
        for rank in sorted(self._ladder.pressed(running, time.monotonic())):
            self._link.post(rank, message)

    def raise_for_failure(self, lost_error: Callable[[Sequence[int], str], RankLostError]) -> None:
        """Raise the one error of the cell, first cause on top; return when all ranks were ok.

        Args:
            lost_error: makes the error of lost ranks from a sentence about `{ranks}`.
        """
        if self.pause is not None and self.pause.is_over:
            return
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
            raise remote_error(first)
        if self._timed_out:
            raise CellTimeoutError(
                f"the cell ran longer than --timeout {self._timeout:g} seconds and was stopped; "
                "variables are kept; give it more time, or none (no --timeout)"
            )
        heard = set(self._endings) | self._recovering.gone
        if silent := sorted(set(self._request.ranks) - heard):
            raise RankBusyError(
                f"rank {', '.join(map(str, silent))} did not stop within "
                f"{GIVE_UP_SECONDS:g} s of being interrupted: it is inside code that cannot be "
                "stopped; `%distributed status` shows when it is idle again"
            )
