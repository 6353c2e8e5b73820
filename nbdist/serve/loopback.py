"""Client and ranks in one process, joined by the wire format: for tests and demos (anywhere)."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from typing import TYPE_CHECKING

from nbdist.errors import RankLostError
from nbdist.messages import Message, Unhandled, from_wire, to_wire, topic_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LoopbackPort", "LoopbackRanks"]


class LoopbackPort:
    """The `RankPort` of one pretended rank."""

    def __init__(self, ranks: LoopbackRanks, rank: int) -> None:
        self.rank = rank
        self.handlers: dict[type[Message], Callable[[Message], None]] = {}
        self._ranks = ranks

    def emit(self, event: Message) -> None:
        """Send an event to the client; see `RankPort.emit`."""
        self._ranks.deliver(self.rank, to_wire(event))

    def on_message(self, kind: type[Message], handler: Callable[[Message], None] | None) -> None:
        """Set or take away a handler; see `RankPort.on_message`."""
        if handler is None:
            self.handlers.pop(kind, None)
        else:
            self.handlers[kind] = handler


class LoopbackRanks:
    """A `RanksPort` whose ranks live in this process; `serve(..., port=ranks.ports[0])` fits on it.

    Events come on one thread, as those of a real link do. Use it as a context, or `close` it.
    """

    def __init__(self, num_ranks: int) -> None:
        self.ports = [LoopbackPort(self, rank) for rank in range(num_ranks)]
        self._lost: set[int] = set()
        self._handlers: dict[type[Message], list[Callable[[int, Message], None]]]
        self._handlers = defaultdict(list)
        self._events: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nbdist-loopback", daemon=True)
        self._thread.start()

    def __enter__(self) -> LoopbackRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_ranks(self) -> int:
        """Number of pretended ranks."""
        return len(self.ports)

    def post(self, rank: int, message: Message) -> None:
        """Send a message to a rank; see `RanksPort.post`."""
        if rank in self._lost:
            raise RankLostError(f"rank {rank} is lost; make a new `LoopbackRanks`", ranks=(rank,))
        received = from_wire(to_wire(message))
        handler = self.ports[rank].handlers.get(type(received))
        if handler is None:
            topic = topic_of(received)
            self.ports[rank].emit(Unhandled(rank=rank, unhandled=received.kind, topic=topic))
        else:
            handler(received)

    def subscribe(
        self, kind: type[Message], handler: Callable[[int, Message], None]
    ) -> Callable[[], None]:
        """Listen to events of a kind; see `RanksPort.subscribe`."""
        self._handlers[kind].append(handler)
        return lambda: self._handlers[kind].remove(handler)

    def deliver(self, rank: int, data: bytes) -> None:
        """Bring an event's bytes to the client, unless the rank is lost."""
        if rank not in self._lost:
            self._events.put((rank, data))

    def lose(self, rank: int) -> None:
        """Pretend that a rank's process has ended: it hears and says nothing more."""
        self.deliver(rank, to_wire(Unhandled(rank=rank, unhandled="lost")))
        self._lost.add(rank)

    def close(self) -> None:
        """End the thread that brings events."""
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._events.get()) is not None:
            rank, data = item
            event = from_wire(data)
            for handler in list(self._handlers[type(event)]):
                handler(rank, event)
