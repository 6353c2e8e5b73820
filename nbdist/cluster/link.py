"""The client's end of the link: one thread that talks with every rank (client)."""

from __future__ import annotations

import collections
import json
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zmq
import zmq.utils.monitor

from nbdist.errors import RankLostError
from nbdist.messages import Message, RankDone, Unhandled, from_wire, to_wire, topic_of

__all__ = ["WorldLink", "lost_event"]

log = logging.getLogger(__name__)
Handler = Callable[[int, Message], None]


class WorldLink:
    """A DEALER socket per rank, owned by one thread; handlers run on that thread.

    A rank is lost when its connection ends: on one host that is when its process ends, within
    milliseconds. What it had sent before is delivered first.

    Args:
        directory: the world's private directory, with its keys.

    Attributes:
        on_unclaimed: is given every event whose id nobody listens to, such as late output.
    """

    def __init__(self, directory: Path) -> None:
        keys = json.loads((directory / "keys.json").read_text())
        self._server_key = keys["public"].encode("ascii")
        self._own_keys = zmq.curve_keypair()
        self._context = zmq.Context()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: dict[int, zmq.Socket[bytes]] = {}
        self._lost: set[int] = set()
        self._topics: dict[str, Handler] = {}
        self._kinds: dict[type[Message], list[Handler]] = {}
        self.on_unclaimed: Handler | None = None
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="nbdist-link", daemon=True)
        self._thread.start()

    @property
    def lost_ranks(self) -> frozenset[int]:
        """Ranks whose process is gone."""
        return frozenset(self._lost)

    def connect(self, rank: int, endpoint: str) -> None:
        """Connect to a rank; one that was lost is no longer."""
        self._lost.discard(rank)
        self._call(lambda: self._connect(rank, endpoint))

    def give_up(self, rank: int) -> None:
        """Take a rank for lost, whatever its connection says, until it is connected again."""
        done = threading.Event()

        def drop() -> None:
            self._lost.add(rank)
            self._drop(rank)
            done.set()

        self._call(drop)
        done.wait()

    def relabel(self, moves: dict[int, int], num_ranks: int) -> None:
        """Call ranks by other numbers, all at once; what was posted before is sent before.

        Args:
            moves: `{old: new}`; a new number is that of no living rank.
            num_ranks: ranks with other numbers from here on are forgotten.
        """
        done = threading.Event()

        def move() -> None:
            for held in (self._sockets, self._monitors):
                moved = {new: held.pop(old) for old, new in moves.items() if old in held}
                held.update(moved)
            for rank in [rank for rank in self._sockets if rank >= num_ranks]:
                self._drop(rank)
            self._lost = {rank for rank in self._lost if rank < num_ranks} - set(moves.values())
            for old in moves:
                self._tell_lost(old)  # nobody who knows a rank by its old number reaches it
            done.set()

        self._call(move)
        done.wait()

    def post(self, rank: int, message: Message) -> None:
        """Send a message to a rank; never blocks."""
        if rank in self._lost or self._closing:
            raise RankLostError(
                f"`{message.kind}` was meant for rank {rank}, whose process is gone; "
                "`%distributed heal` replaces it",
                ranks=(rank,),
            )
        data = to_wire(message)
        self._call(lambda: self._send(rank, data))

    def listen(self, topic: str, handler: Handler | None) -> None:
        """Give every event with this id to `handler`; None ends it."""
        if handler is None:
            self._topics.pop(topic, None)
        else:
            self._topics[topic] = handler

    def subscribe(self, kind: type[Message], handler: Handler) -> Callable[[], None]:
        """Call `handler(rank, event)` for every event of this kind; returns what ends it."""
        handlers = self._kinds.setdefault(kind, [])
        handlers.append(handler)
        return lambda: handlers.remove(handler) if handler in handlers else None

    def close(self) -> None:
        """End the thread and close the sockets; what was posted before is sent."""
        if not self._closing:
            self._closing = True
            self._call(lambda: None)
            self._thread.join(5)

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        os.eventfd_write(self._wake, 1)

    def _connect(self, rank: int, endpoint: str) -> None:
        sock = self._context.socket(zmq.DEALER)
        sock.curve_serverkey = self._server_key
        sock.curve_publickey, sock.curve_secretkey = self._own_keys
        sock.setsockopt(zmq.RECONNECT_IVL, -1)
        sock.setsockopt(zmq.RCVHWM, 0)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.LINGER, 500)
        monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_DELAYED)
        sock.connect(endpoint)
        self._sockets[rank], self._monitors[rank] = sock, monitor
        self._lost.discard(rank)
        self._poller.register(sock, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def _send(self, rank: int, data: bytes) -> None:
        if rank in self._sockets:
            # a peer that has just died: its end is told next, and waiting here would be for ever
            with suppress(zmq.Again):
                self._sockets[rank].send(data, zmq.NOBLOCK)

    def _run(self) -> None:
        while not self._closing:
            ready = dict(self._poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
                self._make_calls()
            for rank, sock in list(self._sockets.items()):
                if sock in ready:
                    self._receive(rank, sock)
                if rank in self._monitors and self._monitors[rank] in ready:
                    self._check(rank)
        # `close` may have been called since the last look: what was posted before it is sent.
        self._make_calls()
        for rank in list(self._sockets):
            self._lose(rank)
        self._context.term()
        os.close(self._wake)

    def _make_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _receive(self, rank: int, sock: zmq.Socket[bytes]) -> None:
        while True:
            try:
                data = sock.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._dispatch(rank, from_wire(data))
            except Exception:
                # A handler's fault must not silence every other rank's events.
                log.exception("an event of rank %d could not be handled", rank)

    def _dispatch(self, rank: int, event: Message) -> None:
        topic = getattr(event, "topic", "") or topic_of(event)
        if handler := self._topics.get(topic) or self.on_unclaimed:
            handler(rank, event)
        for handler in tuple(self._kinds.get(type(event), ())):
            handler(rank, event)

    def _check(self, rank: int) -> None:
        event = zmq.utils.monitor.recv_monitor_message(self._monitors[rank])
        if event["event"] != zmq.EVENT_DISCONNECTED:
            return
        self._receive(rank, self._sockets[rank])
        self._lose(rank)

    def _lose(self, rank: int) -> None:
        """Note that a rank is gone and tell everyone who waits for something of it."""
        self._lost.add(rank)
        self._drop(rank)
        for topic, handler in list(self._topics.items()):
            handler(rank, lost_event(rank, topic))
        self._tell_lost(rank)

    def _tell_lost(self, rank: int) -> None:
        for handler in tuple(self._kinds.get(Unhandled, ())):
            try:
                handler(rank, Unhandled(rank=rank, unhandled="lost"))
            except Exception:
                log.exception("the loss of rank %d could not be handled", rank)

    def _drop(self, rank: int) -> None:
        if rank not in self._sockets:
            return
        sock, monitor = self._sockets.pop(rank), self._monitors.pop(rank)
        self._poller.unregister(sock)
        self._poller.unregister(monitor)
        sock.disable_monitor()
        monitor.close(0)
        sock.close()


def lost_event(rank: int, topic: str) -> RankDone:
    """Return the event by which a cell ends on a rank whose process is gone."""
    return RankDone(rank=rank, cell_id=topic, seq=-1, status="lost", seconds=0.0)
