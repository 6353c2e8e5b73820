"""A world: the ranks behind a notebook or a script (client)."""

from __future__ import annotations

import atexit
import threading
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from nbdist.cluster import attaching, names, objects, starting
from nbdist.cluster.asking import OnInput, answering
from nbdist.cluster.config import WorldConfig
from nbdist.cluster.launch import Processes, end_world
from nbdist.cluster.link import WorldLink
from nbdist.cluster.mapping import Run
from nbdist.cluster.names_table import NamesTable
from nbdist.cluster.result import CellResult
from nbdist.cluster.running import Running
from nbdist.cluster.searching import Searching
from nbdist.cluster.serving import Serving
from nbdist.cluster.source import check_ranks, check_source
from nbdist.errors import NoWorldError
from nbdist.messages import (
    TEXT_LIMIT,
    Interrupt,
    Message,
    RankInfo,
    RunCell,
    Shutdown,
    StatusQuery,
)
from nbdist.runfiles import WorldRecord, find_world

__all__ = ["World"]


class World(Searching, Running, Serving):
    """Ranks that keep their variables between calls. Use as a context manager in scripts.

    Made by `World.start` or `World.attach`. Every method may be called from the client only;
    methods that run code block until the ranks are done.
    """

    def __init__(self, record: WorldRecord, link: WorldLink, ranks: list[RankInfo]) -> None:
        self.record = record
        self.infos = ranks
        self._link = link
        self._processes: Processes | None = None
        self._generation = max(info.generation for info in ranks)
        self._group_broken = False
        self._run: Run | None = None
        self._lock = threading.Lock()
        self._objects = objects.Objects(record, lambda: self.infos)
        self.is_running = True

    @classmethod
    def start(
        cls,
        num_ranks: int | None = None,
        *,
        on_stage: Callable[[str], None] | None = None,
        **config: Any,
    ) -> World:
        """Start ranks and return when a collective has been verified on every one of them.

        Args:
            num_ranks: how many; None takes one per GPU, else one per two cores, at least 2.
            on_stage: is told in words what the start is doing.
            **config: the other settings of `WorldConfig`.

        Raises:
            StartError: names the stage and the cause; nothing is left running.
        """
        settings = WorldConfig.of(num_ranks=num_ranks, **config)
        started = starting.start(settings, on_stage or (lambda _text: None))
        world = cls(started.processes.record, started.link, started.infos)
        world._processes = started.processes
        started.processes.start_spares()
        if not settings.keep:
            atexit.register(world.stop)
        return world

    @classmethod
    def attach(cls, world_id: str | None = None) -> World:
        """Return a world that another client started, with the variables of its ranks.

        Ranks whose process is gone are in `lost_ranks`; `heal` starts new ones.

        Args:
            world_id: which one; None takes the only one that runs.

        Raises:
            NoWorldError: there is none, or several and none was named.
        """
        record = find_world(world_id)
        link = WorldLink(Path(record.directory))
        return cls(record, link, attaching.connect(link, record))

    @property
    def num_ranks(self) -> int:
        """Number of ranks, the lost ones included."""
        return self.record.num_ranks

    @property
    def world_id(self) -> str:
        """The name to attach by."""
        return self.record.world_id

    def run(
        self,
        source: str,
        ranks: Sequence[int] | str | None = None,
        timeout_seconds: float | None = None,
        *,
        on_input: OnInput | None = None,
    ) -> CellResult:
        """Run source on ranks and wait; a failure on any rank raises.

        The result holds up to 64 Mi characters of a rank's text and says how many are left out.

        Args:
            source: a cell; magics, `!` and top-level `await` work.
            ranks: which ones, as numbers or as text like `0,2:4`; None for all.
            timeout_seconds: stop the cell after this time.
            on_input: `on_input(rank, prompt, is_secret)` answers `input()` and debuggers; one
                rank asks at a time. None: ranks that ask get an error.

        Raises:
            RemoteCellError: the first failure, with the rank's own traceback.
            SyntaxError: in the source; no rank was touched.
        """
        result = CellResult.of(check_ranks(ranks, self.num_ranks))
        stream = self.stream(source, ranks, timeout_seconds, can_ask=on_input is not None)
        for event in answering(stream, on_input, self.post):
            result.add(event)
        return result

    def stream(
        self,
        source: str,
        ranks: Sequence[int] | str | None = None,
        timeout_seconds: float | None = None,
        *,
        execution_count: int = 0,
        text_limit: int = TEXT_LIMIT,
        can_ask: bool = False,
    ) -> Generator[Message | None, None, None]:
        """Run source on ranks and yield its events as they come; None when time passes.

        Ends like `run`. Throwing KeyboardInterrupt into it stops the cell on every rank.
        A rank sends at most `text_limit` characters at once; all of it is in its log. With
        `can_ask` it yields each `InputRequest`, to be answered by `post(rank, request.reply("x"))`.
        """
        check_source(source)
        chosen = check_ranks(ranks, self.num_ranks)
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds={timeout_seconds} must be more than 0 seconds")
        self._check_alive(chosen)
        request = RunCell(
            cell_id=uuid.uuid4().hex,
            source=source,
            ranks=chosen,
            execution_count=execution_count,
            text_limit=text_limit,
            can_ask=can_ask,
        )
        return self._stream(request, timeout_seconds)

    def interrupt(self) -> None:
        """Stop the cell that runs on the ranks, whoever sent it; returns at once.

        A cell of this client ends as KeyboardInterrupt in the thread that runs it.
        """
        if (run := self._run) is not None:
            run.stop()
            return
        for cell_id in {info.running_cell for info in self.status()} - {""}:
            for rank in set(range(self.num_ranks)) - self._link.lost_ranks:
                self._link.post(rank, Interrupt(cell_id=cell_id))

    def apply(
        self, fn: Callable[..., Any], *args: Any, ranks: Sequence[int] | str | None = None
    ) -> list[Any]:
        """Call `fn(*args)` on ranks; return results in rank order. Raises RemoteCellError."""
        chosen = check_ranks(ranks, self.num_ranks)
        self._check_alive(chosen)
        return self._objects.apply(fn, args, chosen)

    def push(self, ranks: Sequence[int] | str | None = None, **values: Any) -> None:
        """Set names in the ranks' namespace to copies of these values."""
        chosen = check_ranks(ranks, self.num_ranks)
        self._check_alive(chosen)
        self._objects.push(values, chosen)

    def pull(self, name: str, ranks: Sequence[int] | str | None = None) -> dict[int, object]:
        """Return copies of the ranks' values of a name, by rank.

        Raises:
            RemoteCellError: a rank has no such name, or its value cannot be copied.
        """
        chosen = check_ranks(ranks, self.num_ranks)
        self._check_alive(chosen)
        return self._objects.pull(name, chosen)

    def who(self, pattern: str | None = None) -> NamesTable:
        """List the names on the ranks that match a pattern such as `x*`; never collective."""
        self._check_alive([])
        return names.list_names(self, range(self.num_ranks), pattern or "")

    def status(self) -> list[RankInfo]:
        """Ask every living rank who it is and what it runs; answers while cells run."""
        query = StatusQuery(query_id=uuid.uuid4().hex)
        alive = sorted(set(range(self.num_ranks)) - self._link.lost_ranks)
        answers = starting.ask(self._link, query, alive, timeout_seconds=2.0)
        return [answers[rank] for rank in sorted(answers)]

    @property
    def lost_ranks(self) -> frozenset[int]:
        """Ranks whose process is gone."""
        return self._link.lost_ranks

    def post(self, rank: int, message: Message) -> None:
        """Send a message past the cells (for serving); see `nbdist.serve.ports.RanksPort`."""
        self._link.post(rank, message)

    def subscribe(
        self, kind: type[Message], handler: Callable[[int, Message], None]
    ) -> Callable[[], None]:
        """Call `handler(rank, event)` on the link's thread; returns what ends it."""
        return self._link.subscribe(kind, handler)

    def on_late_event(self, handler: Callable[[int, Message], None] | None) -> None:
        """Give what ranks send of a cell after its end to `handler`, on the link's thread."""
        self._link.on_unclaimed = handler

    def stop(self) -> None:
        """End every process of the world and remove its files; may be called again."""
        if not self.is_running:
            return
        self.is_running = False
        atexit.unregister(self.stop)
        self._objects.close()
        for rank in set(range(self.num_ranks)) - self._link.lost_ranks:
            self._link.post(rank, Shutdown())
        self._link.close()
        if self._processes is not None:
            self._processes.stop(patience_seconds=1.0)
        else:
            end_world(self.record)

    def _check_alive(self, ranks: Sequence[int]) -> None:
        if not self.is_running:
            raise NoWorldError("this world has been stopped; start one: `%distributed start -n 2`")
        if lost := sorted(self._link.lost_ranks & set(ranks)):
            raise self.lost_error(lost, "rank {ranks} is wanted, but its process is gone")

    def __enter__(self) -> World:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self.is_running else "stopped"
        age = time.time() - self.record.started_at
        return f"<World {self.world_id}: {self.num_ranks} ranks, {state}, {age:.0f} s old>"
