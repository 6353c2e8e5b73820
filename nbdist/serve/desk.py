"""Where a rank's replicas are found by name: messages in, the right inbox (rank; torch-free)."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Protocol

from nbdist.messages import (
    CancelRequest,
    EngineStats,
    GenerateRequest,
    ListServed,
    Message,
    ModelServed,
    ModelsUnloaded,
    ServedList,
    ServeQuery,
    TokenEvent,
    UnloadModels,
)
from nbdist.serve.freeing import give_back_memory, held_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

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

    def drain(self, *, wait: bool = True) -> None:
        """Take no more requests and end after those that run; wait for it unless told not to."""
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
        self._handlers: dict[type[Message], Callable[[Message], None]] = {
            ServeQuery: self._answer,
            ListServed: self._list,
            GenerateRequest: self._generate,
            CancelRequest: self._cancel,
            UnloadModels: self._unload,
        }

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
            for kind, handler in self._handlers.items():
                self._port.on_message(kind, handler)
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
        """Forget a replica and tell the client; nothing happens when another has its name."""
        with self._lock:
            if self._replicas.get(replica.served.model) is not replica:
                return
            del self._replicas[replica.served.model]
            if not self._replicas:
                for kind in self._handlers:
                    self._port.on_message(kind, None)
        self._port.emit(dataclasses.replace(replica.served, state="gone"))

    def _answer(self, query: Message) -> None:
        assert isinstance(query, ServeQuery), f"a ServeQuery handler got {query!r}"
        with self._lock:
            replica = self._replicas.get(query.model)
        if replica is None:
            gone = _gone(self._port.rank, query.model)
            self._port.emit(dataclasses.replace(gone, query_id=query.query_id))
        else:
            now = dataclasses.replace(replica.served, stats=replica.stats())
            self._port.emit(dataclasses.replace(now, query_id=query.query_id))

    def _list(self, query: Message) -> None:
        assert isinstance(query, ListServed), f"a ListServed handler got {query!r}"
        with self._lock:
            replicas = [self._replicas[name] for name in sorted(self._replicas)]
        models = tuple(dataclasses.replace(one.served, stats=one.stats()) for one in replicas)
        self._port.emit(ServedList(rank=self._port.rank, query_id=query.query_id, models=models))

    def _unload(self, order: Message) -> None:
        assert isinstance(order, UnloadModels), f"an UnloadModels handler got {order!r}"
        with self._lock:
            replicas = [one for name, one in self._replicas.items() if order.model in (None, name)]
        for replica in replicas:
            replica.drain(wait=False)  # all doors at once, before anybody is told
            replica.served = dataclasses.replace(replica.served, state="draining")
            self._port.emit(replica.served)
        # a thread, because requests may run on for minutes, and the control thread must not wait
        threading.Thread(
            target=self._free, args=(order, replicas), name="nbdist-unload", daemon=True
        ).start()

    def _free(self, order: UnloadModels, replicas: list[Served]) -> None:
        """End replicas, give back their memory, and say how much it was."""
        before = held_bytes()
        models = tuple(replica.served.model for replica in replicas)
        while replicas:
            replica = replicas.pop()
            if order.now:
                replica.stop(f"model {replica.served.model!r} was unloaded")
            replica.drain()  # after `stop` too, which waits for a step only so long
            del replica  # the last reference here: its memory is counted below
        give_back_memory()
        after = held_bytes()
        self._port.emit(
            ModelsUnloaded(
                rank=self._port.rank,
                query_id=order.query_id,
                models=models,
                host_bytes=(before.host, after.host),
                device_bytes=(before.device, after.device),
            )
        )

    def _generate(self, request: Message) -> None:
        assert isinstance(request, GenerateRequest), f"a GenerateRequest handler got {request!r}"
        for _ in range(2):  # the first found may just have been replaced
            with self._lock:
                replica = self._replicas.get(request.model)
                names = sorted(self._replicas)
            if replica is not None and replica.put(request):
                return
        rank, model = self._port.rank, request.model
        reason = "error" if replica is None else "replica_lost"
        detail = f"model {model!r} is being unloaded on rank {rank}; serve it again"
        if replica is None:
            detail = (
                f"model {model!r} was asked for, and rank {rank} serves {names}; run "
                f"`serve(model, tokenizer, {model!r})` in a %%distributed cell first"
            )
        self._port.emit(
            TokenEvent(
                request_id=request.request_id,
                rank=rank,
                index=0,
                text="",
                finish_reason=reason,
                detail=detail,
            )
        )

    def _cancel(self, request: Message) -> None:
        with self._lock:
            replicas = list(self._replicas.values())
        for replica in replicas:  # ids are unique, and those that do not know it do nothing
            replica.put(request)


def _gone(rank: int, model: str) -> ModelServed:
    return ModelServed(
        rank=rank, model=model, version=0, max_batch=0, context_length=0, state="gone"
    )


_desks: dict[int, tuple[RankPort, Desk]] = {}
_desks_lock = threading.Lock()


def desk_of(port: RankPort) -> Desk:
    """Return the one desk of a port; a rank has one port for its life."""
    with _desks_lock:
        if id(port) not in _desks:
            _desks[id(port)] = (port, Desk(port))
        return _desks[id(port)][1]
