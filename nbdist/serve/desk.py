"""Where a rank's replicas are found by name: messages in, the right inbox (rank; torch-free)."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Protocol

from nbdist.messages import (
    CancelRequest,
    EngineStats,
    GenerateRequest,
    Message,
    ModelServed,
    ServeQuery,
    TokenEvent,
)

if TYPE_CHECKING:
    from nbdist.serve.ports import RankPort

__all__ = ["Desk", "Served", "desk_of"]


class Served(Protocol):
    """A replica, as the desk knows it."""

    served: ModelServed

    def put(self, message: Message) -> bool:
        """Hand over a message; False when the replica has stopped."""
        ...

    def stats(self) -> EngineStats:
        """Return what its engine is doing; from any thread."""
        ...

    def stop(self, detail: str = "") -> None:
        """End the replica and its requests."""
        ...


class Desk:
    """Hands a rank's serving messages to its replicas.

    The handlers run on the rank's control thread and only put things into inboxes. With no
    replica left they are taken away, so that the rank answers `Unhandled` again.
    """

    def __init__(self, port: RankPort) -> None:
        self._port = port
        self._lock = threading.RLock()
        self._replicas: dict[str, Served] = {}
        self._versions: dict[str, int] = {}

    def next_version(self, name: str) -> int:
        """Return the version of the next replica of this name; it counts from 1."""
        with self._lock:
            self._versions[name] = self._versions.get(name, 0) + 1
            return self._versions[name]

    def install(self, replica: Served) -> None:
        """Let a replica answer for its name, end the one before it, and tell the client."""
        served = replica.served
        with self._lock:
            old = self._replicas.get(served.model)
            self._replicas[served.model] = replica
            self._port.on_message(ServeQuery, self._answer)
            self._port.on_message(GenerateRequest, self._generate)
            self._port.on_message(CancelRequest, self._cancel)
        if old is not None:
            old.stop(f"version {served.version} of model {served.model!r} took over; send it again")
        self._port.emit(served)

    def end(self, name: str, detail: str) -> None:
        """End the replica of a name, if there is one."""
        with self._lock:
            replica = self._replicas.get(name)
        if replica is not None:
            replica.stop(detail)

    def remove(self, replica: Served) -> None:
        """Forget a replica; nothing happens when another has taken its name."""
        with self._lock:
            if self._replicas.get(replica.served.model) is not replica:
                return
            del self._replicas[replica.served.model]
            if not self._replicas:
                for kind in (ServeQuery, GenerateRequest, CancelRequest):
                    self._port.on_message(kind, None)

    def _answer(self, query: Message) -> None:
        assert isinstance(query, ServeQuery), f"a ServeQuery handler got {query!r}"
        with self._lock:
            replicas = list(self._replicas.values())
        for one in replicas:
            answer = dataclasses.replace(one.served, query_id=query.query_id, stats=one.stats())
            self._port.emit(answer)

    def _generate(self, request: Message) -> None:
        assert isinstance(request, GenerateRequest), f"a GenerateRequest handler got {request!r}"
        for _ in range(2):  # the first found may just have been replaced
            with self._lock:
                replica = self._replicas.get(request.model)
                names = sorted(self._replicas)
            if replica is not None and replica.put(request):
                return
        self._port.emit(
            TokenEvent(
                request_id=request.request_id,
                rank=self._port.rank,
                index=0,
                text="",
                finish_reason="error",
                detail=(
                    f"model {request.model!r} was asked for, and rank {self._port.rank} serves "
                    f"{names}; run `serve(model, tokenizer, {request.model!r})` in a "
                    "%%distributed cell first"
                ),
            )
        )

    def _cancel(self, request: Message) -> None:
        with self._lock:
            replicas = list(self._replicas.values())
        for replica in replicas:  # ids are unique, and those that do not know it do nothing
            replica.put(request)


_desks: dict[int, tuple[RankPort, Desk]] = {}
_desks_lock = threading.Lock()


def desk_of(port: RankPort) -> Desk:
    """Return the one desk of a port; a rank has one port for its life."""
    with _desks_lock:
        if id(port) not in _desks:
            _desks[id(port)] = (port, Desk(port))
        return _desks[id(port)][1]
