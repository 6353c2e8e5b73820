"""The rank's end of the link: one thread that talks with clients and never runs user code (rank).

It answers while the main thread computes or hangs, so stopping, asking and serving never queue
behind a cell. Other threads hand it events; it alone touches the socket.
"""

from __future__ import annotations

import collections
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from nbdist.messages import Message, Unhandled, from_wire, to_wire, topic_of

__all__ = ["RankLink"]

log = logging.getLogger(__name__)
Handler = Callable[[Message], None]
# the last event of a query
_ANSWERS = ("rank_info", "join_failed", "names_answer", "where", "served_list", "unloaded")


class RankLink:
    """A ROUTER socket that clients connect to, and the control thread that owns it.

    Args:
        rank: this rank.
        interface: address to listen on.
        keys: CURVE key pair of the world, `(public, secret)`.
    """

    def __init__(self, rank: int, interface: str, keys: tuple[bytes, bytes]) -> None:
        self.rank = rank
        self._handlers: dict[type[Message], Handler] = {}
        self._outbox: collections.deque[Message] = collections.deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._woken = False
        self._routes: dict[str, bytes] = {}
        self._clients: dict[bytes, None] = {}
        self._flush_at: float | None = None
        self._flush: Callable[[], None] = lambda: None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        port = self._socket.bind_to_random_port(f"tcp://{interface}")
        self.endpoint = f"tcp://{interface}:{port}"
        self._thread = threading.Thread(target=self._run, name="nbdist-control", daemon=True)

    def start(self) -> None:
        """Start the control thread."""
        self._thread.start()

    def emit(self, event: Message) -> None:
        """Send an event to the client whose request it answers, else to all; never blocks."""
        self._outbox.append(event)
        self._signal()

    def on_message(self, kind: type[Message], handler: Handler | None) -> None:
        """Call `handler` on the control thread for every message of this kind."""
        if handler is None:
            self._handlers.pop(kind, None)
        else:
            self._handlers[kind] = handler

    def flush_with(self, flush: Callable[[], None]) -> None:
        """Set what `flush_soon` calls on the control thread."""
        self._flush = flush

    def flush_soon(self, delay_seconds: float) -> None:
        """Call the flush function once after a delay; may be called from any thread."""
        if self._flush_at is None:
            self._flush_at = time.monotonic() + delay_seconds
            self._signal()

    def _signal(self) -> None:
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while True:
            wait = None
            if self._flush_at is not None:
                wait = max(0, math.ceil((self._flush_at - time.monotonic()) * 1000))
            ready = dict(poller.poll(wait))
            if self._wake in ready:
                os.eventfd_read(self._wake)
                self._woken = False
            if self._flush_at is not None and time.monotonic() >= self._flush_at:
                self._flush_at = None
                with self._going_on("sending", "output"):
                    self._flush()
            if self._socket in ready:
                self._receive()
            self._send_all()

    def _receive(self) -> None:
        while True:
            try:
                client, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._clients[client] = None
            try:
                message = from_wire(data)
            except ValueError:
                log.exception("rank %d dropped a message it cannot read", self.rank)
                continue
            topic = topic_of(message)
            if topic:
                # The first to use an id has asked; another client may send an interrupt for it.
                self._routes.setdefault(topic, client)
            handler = self._handlers.get(type(message))
            if handler is None:
                event = Unhandled(rank=self.rank, unhandled=message.kind, topic=topic)
                self._outbox.append(event)
            else:
                with self._going_on("handling", message):
                    handler(message)

    @contextmanager
    def _going_on(self, doing: str, what: object) -> Iterator[None]:
        """Log what is raised inside: without this thread the rank cannot be stopped or freed."""
        try:
            yield
        except Exception:
            log.exception("rank %d failed when %s %s", self.rank, doing, what)

    def _send_all(self) -> None:
        while self._outbox:
            event = self._outbox.popleft()
            topic = topic_of(event)
            client = self._routes.get(topic or getattr(event, "topic", ""))
            with self._going_on("sending", event.kind):
                data = to_wire(event)
                for identity in [client] if client is not None else list(self._clients):
                    self._socket.send_multipart([identity, data])
            if getattr(event, "finish_reason", None) or event.kind in _ANSWERS:
                self._routes.pop(topic, None)
