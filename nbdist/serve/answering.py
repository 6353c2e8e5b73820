"""A replica: one thread that serves one resident model on one rank (rank)."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from typing import TYPE_CHECKING

import torch

from nbdist.messages import CancelRequest, EngineStats, GenerateRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from nbdist.messages import Message, ModelServed
    from nbdist.serve.batcher import Batcher

__all__ = ["Replica"]

_log = logging.getLogger(__name__)


class Replica:
    """The thread that serves one model; made by `serve`.

    Args:
        batcher: does the work; touched by the thread only.
        served: how the replica introduces itself.
        on_end: called once, with the replica, when it takes no more requests.
        device: of the model.
    """

    def __init__(
        self,
        batcher: Batcher,
        served: ModelServed,
        *,
        on_end: Callable[[Replica], None],
        device: torch.device,
    ) -> None:
        self.served = served
        self._batcher: Batcher | None = batcher
        self._stats: Callable[[], EngineStats] = batcher.engine.stats
        self._on_end = on_end
        self._device = device
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._using = threading.Lock()  # the batcher
        self._open = True
        self._draining = False
        self._end = ("cancelled", "")
        self._thread = threading.Thread(
            target=self._run, name=f"nbdist-serve-{served.model}-{served.version}", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        state = "serving" if self.running else "stopped"
        s = self.served
        return (
            f"Replica(model={s.model!r}, version={s.version}, rank={s.rank}, "
            f"max_batch={s.max_batch}, engine={s.engine!r}, {state})"
        )

    @property
    def running(self) -> bool:
        """Whether it takes requests."""
        return self._open

    def stats(self) -> EngineStats:
        """Return what its engine is doing, as it is between or within two steps."""
        return self._stats()

    def put(self, message: Message) -> bool:
        """Hand over a `GenerateRequest` or `CancelRequest`; False when the replica has stopped."""
        with self._lock:
            takes = self._open or (self._draining and isinstance(message, CancelRequest))
            if takes:
                self._inbox.put(message)
            return takes

    def drain(self, *, wait: bool = True) -> None:
        """Take no more requests and end after those that run; wait until the memory is free."""
        with self._lock:
            if self._open:
                self._open, self._draining = False, True
                self._inbox.put(CancelRequest(request_id=""))  # wakes an idle thread
        if wait:
            self._thread.join()
            self._on_end(self)

    def stop(self, detail: str = "", *, timeout_seconds: float = 10.0) -> None:
        """Take no more requests, end the running ones as `cancelled`, and free the memory.

        Args:
            detail: told to those whose requests end.
            timeout_seconds: how long to wait for the step that runs.
        """
        with self._lock:
            if self._open or self._draining:
                self._open = self._draining = False
                detail = detail or f"`stop` ended the replica of model {self.served.model!r}"
                self._end = ("cancelled", detail)
                self._inbox.put(None)
        self._on_end(self)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            _log.warning("%r is still in a step after %s s", self, timeout_seconds)

    def answer(self, turn: AbstractContextManager[None], max_steps: int) -> bool:
        """Do up to so many steps on the calling thread, while there is work.

        A training thread calls it between two updates. What goes wrong ends the replica alone.

        Args:
            turn: entered around the steps.
            max_steps: most steps.

        Returns:
            Whether the replica is still there.
        """
        with self._using:
            if (batcher := self._batcher) is None or not (self._open or self._draining):
                return False
            try:
                with turn:
                    for _ in range(max_steps):
                        if batcher.wait_seconds() != 0.0:
                            break
                        batcher.step()
            except BaseException as error:
                self._fail(error)
                self._inbox.put(None)
                if not isinstance(error, Exception):
                    raise
            return self._open or self._draining

    def _run(self) -> None:
        batcher = self._batcher
        assert batcher is not None, "a replica's thread runs once"
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else None
        with on_device or contextlib.nullcontext():
            try:
                while self._receive(batcher):
                    with self._using:
                        batcher.step()
            except Exception as error:  # noqa: BLE001 - becomes the requests' ending
                self._fail(error)
            with self._using:
                self._batcher = None
            while not self._inbox.empty():  # what came before the door closed
                self._handle(batcher, self._inbox.get_nowait())
            batcher.end_all(*self._end)
            batcher.close()
            self._stats = EngineStats  # the engine, and with it the weights, is let go

    def _fail(self, error: BaseException) -> None:
        """Take no more requests, and let those that run end by what happened."""
        _log.error("%r ended", self, exc_info=error)
        detail = (
            f"the replica of model {self.served.model!r} on rank {self.served.rank} ended "
            f"by {type(error).__name__}: {error}; call `serve` again"
        )
        with self._lock:
            self._open = self._draining = False
            self._end = ("error", detail)
        self._on_end(self)

    def _receive(self, batcher: Batcher) -> bool:
        """Take all messages that are there, waiting when there is no work; False at the end."""
        with self._using:
            if self._draining and self._inbox.empty() and not batcher.num_requests:
                return False
            wait = batcher.wait_seconds()
        try:
            message = self._inbox.get(block=wait != 0.0, timeout=wait or None)
            while self._handle(batcher, message):
                message = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _handle(self, batcher: Batcher, message: Message | None) -> bool:
        with self._using:
            if isinstance(message, GenerateRequest):
                batcher.submit(message)
            elif isinstance(message, CancelRequest):
                batcher.cancel(message.request_id)
        return message is not None
