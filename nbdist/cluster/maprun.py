"""One run of `World.map`: who has which items, and what becomes of a dead rank's (client)."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import signal
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from nbdist.cluster.bar import Bar
from nbdist.cluster.link import WorldLink
from nbdist.cluster.objects import Objects
from nbdist.errors import CellInterrupted, ItemError, NbdistError, RankLostError
from nbdist.messages import RankInfo

__all__ = ["MapRun", "Task", "dumps", "pack_task"]

POLL_SECONDS = 0.05
STOP_SECONDS = 5.0  # that a rank has to leave the item that it runs
SIGNAL_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be done.

    Attributes:
        function: pickled.
        items: pickled, one by one.
        retries: how often an item is tried again after the death of its rank.
    """

    function: bytes
    items: list[bytes]
    retries: int


def pack_task(fn: Callable[[Any], Any], items: Iterable[Any], *, retries: int) -> Task:
    """Pickle a function and its items.

    Raises:
        NbdistError: one of them cannot be pickled; the text names it.
    """
    packed = [dumps(item, f"item {index}") for index, item in enumerate(items)]
    return Task(function=dumps(fn, "the function"), items=packed, retries=retries)


class MapRun:
    """Gives batches to ranks and takes their answers.

    Args:
        objects: calls functions on ranks.
        link: knows which ranks are lost.
        infos: returns who the ranks are.
        task: what to do.
    """

    def __init__(
        self, objects: Objects, link: WorldLink, infos: Callable[[], list[RankInfo]], task: Task
    ) -> None:
        self._objects = objects
        self._link = link
        self._infos = infos
        self._task = task
        self._name = uuid.uuid4().hex
        self._waiting: collections.deque[list[int]] = collections.deque()
        self._running: dict[int, tuple[Any, list[int]]] = {}  # by rank: its answer to come, items
        self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._idle: set[int] = set()
        self._informed: set[int] = set()  # ranks that have the function
        self._deaths: dict[int, list[int]] = collections.defaultdict(list)  # ranks, by item
        self._died: list[int] = []
        self._done: dict[int, Any] = {}
        self._stop_asked = threading.Event()

    def stop(self) -> None:
        """End the map, from another thread."""
        self._stop_asked.set()

    def results(self, ranks: Sequence[int], size: int, *, progress: bool) -> list[Any]:
        """Do the task on ranks, in batches of a size; see `World.map`."""
        number = len(self._task.items)
        self._waiting.extend(list(range(number))[i : i + size] for i in range(0, number, size))
        self._idle = set(ranks)
        with Bar(total=number, shown=progress, desc="map", unit="item") as bar:
            try:
                while len(self._done) < number:
                    self._give_all()
                    self._take_next()
                    bar.update(len(self._done) - bar.n)
            except KeyboardInterrupt:
                left = self._end_running()
                raise CellInterrupted(
                    f"{len(self._done)} of {number} items were done{left}"
                ) from None
            except BaseException:
                self._end_running()
                raise
        if self._died:
            warnings.warn(self._told_deaths(), RuntimeWarning, stacklevel=4)
        return [self._done[index] for index in range(number)]

    def _give_all(self) -> None:
        """Give every rank that waits a batch."""
        self._idle -= self._link.lost_ranks
        if not self._idle and not self._running:
            raise RankLostError(
                f"{len(self._done)} of {len(self._task.items)} items were done, but no rank is "
                "left; `%distributed heal` starts processes in their place",
                ranks=tuple(self._died),
            )
        while self._waiting and self._idle:
            rank = min(self._idle)
            self._idle.remove(rank)
            self._give(rank, self._waiting.popleft())

    def _give(self, rank: int, indices: list[int]) -> None:
        # only here: what runs on ranks is not for the client to load before
        from nbdist.rank.batches import run_batch

        function = None if rank in self._informed else self._task.function
        self._informed.add(rank)
        items = [self._task.items[index] for index in indices]
        answer = self._objects.submit(run_batch, (self._name, function, items), rank)
        self._running[rank] = (answer, indices)
        answer.add_done_callback(lambda done: self._answers.put((rank, done)))

    def _take_next(self) -> None:
        """Wait for the next answer, or for a moment; look after the dead."""
        if self._stop_asked.is_set():
            raise KeyboardInterrupt
        with contextlib.suppress(queue.Empty):
            rank, answer = self._answers.get(timeout=POLL_SECONDS)
            if rank in self._running and self._running[rank][0] is answer:
                self._take(rank)
        for rank in self._link.lost_ranks & self._running.keys():
            if not self._running[rank][0].done():
                self._bury(rank)

    def _take(self, rank: int) -> None:
        answer, indices = self._running.pop(rank)
        self._idle.add(rank)
        outcome = self._objects.result(answer, rank)
        if outcome is None:  # another client's map has taken the place of the function
            self._informed.discard(rank)
            self._waiting.appendleft(indices)
            return
        values, failure = outcome
        for index, value in zip(indices, values, strict=False):
            self._done[index] = cloudpickle.loads(value)
        if failure is not None:
            if failure[0] == "KeyboardInterrupt":
                raise KeyboardInterrupt
            raise ItemError(indices[len(values)], rank, *failure, done=self._done)

    def _bury(self, rank: int) -> None:
        """Have what a dead rank has not answered done by the others, one by one.

        So an item that kills its rank takes no other with it the next time.
        """
        _, indices = self._running.pop(rank)
        self._died.append(rank)
        self._waiting.extendleft([index] for index in reversed(indices))
        for index in indices:
            self._deaths[index].append(rank)
            if len(self._deaths[index]) > self._task.retries:
                ranks = ", ".join(map(str, self._deaths[index]))
                raise RankLostError(
                    f"item {index} was not done: it, or its batch, was running when rank {ranks} "
                    f"died, and retries={self._task.retries}; `%distributed heal`, then look at "
                    f"that item, {_shown(self._task.items[index])}",
                    ranks=tuple(self._died),
                )

    def _end_running(self) -> str:
        """Interrupt what runs and wait for it; return what to tell of ranks that go on."""
        deadline = time.monotonic() + STOP_SECONDS
        pids = {i.rank: i.pid for i in self._infos() if i.host == socket.gethostname()}
        while self._running and time.monotonic() < deadline:
            for rank in self._running.keys() & pids.keys():
                with contextlib.suppress(ProcessLookupError):
                    # again and again: outside an item a rank does not listen
                    os.kill(pids[rank], signal.SIGINT)
            with contextlib.suppress(queue.Empty):
                rank, _ = self._answers.get(timeout=SIGNAL_SECONDS)
                self._running.pop(rank, None)
            for rank in self._link.lost_ranks & self._running.keys():
                self._running.pop(rank)
        if not self._running:
            return ""
        ranks = ",".join(map(str, sorted(self._running)))
        return f"; rank {ranks} has not left its item: `%distributed restart -r {ranks}` ends it"

    def _told_deaths(self) -> str:
        ranks = ",".join(map(str, sorted(self._died)))
        return (
            f"rank {ranks} died during this map; {len(self._deaths)} items that it had were done "
            "by the others, and may have run twice; `%distributed heal` starts a process in its "
            "place"
        )


def dumps(value: Any, what: str, asked: str = "map") -> bytes:
    """Pickle what ranks are to get.

    Args:
        value: to pickle.
        what: it is, for the error.
        asked: the call that wants to send it.

    Raises:
        NbdistError: it cannot be pickled.
    """
    try:
        packed: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise NbdistError(
            f"{asked} was not run: {what} ({_cut(repr(value))}) cannot be sent to a rank: {error}; "
            "make it on the rank, from something that can be pickled"
        ) from error
    return packed


def _shown(item: bytes) -> str:
    return _cut(repr(cloudpickle.loads(item)))


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
