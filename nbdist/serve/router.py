"""Requests to the least loaded replica, events back to their senders (client; torch-free)."""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.errors import Overloaded, RankLostError, ServeError
from nbdist.messages import (
    CancelRequest,
    EngineStats,
    GenerateRequest,
    Message,
    ModelServed,
    ServeQuery,
    TokenEvent,
    Unhandled,
)
from nbdist.serve.balance import Balance, nobody_serves
from nbdist.serve.generation import Generation
from nbdist.serve.request import sampling_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.serve.ports import RanksPort

__all__ = ["Router"]


@dataclass(slots=True)
class _Sent:
    """A request that has not ended: who waits for it, and where it runs."""

    generation: Generation
    rank: int
    retried: bool = False
    cancelled: bool = False


class Router:
    """The client's door to a model that ranks serve.

    Args:
        ranks: the way to the ranks.
        model: the name given to `serve`.
        query_seconds: how long to wait for the ranks to say what they serve.
        max_waiting: most requests a replica has from this router beyond its `max_batch`.
        clock: monotonic seconds, for the numbers of a `Generation`.

    Raises:
        ServeError: no rank serves a model of this name.
    """

    def __init__(
        self,
        ranks: RanksPort,
        model: str = "default",
        *,
        query_seconds: float = 5.0,
        max_waiting: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self._ranks = ranks
        self._clock = clock
        self._changed = threading.Condition(threading.RLock())
        self._replicas = Balance(max_waiting)
        self._silent: set[int] = set()
        self._sent: dict[str, _Sent] = {}
        self._unsubscribe = [
            ranks.subscribe(ModelServed, self._on_served),
            ranks.subscribe(TokenEvent, self._on_token),
            ranks.subscribe(Unhandled, self._on_unhandled),
        ]
        try:
            self.refresh(query_seconds)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"Router(model={self.model!r}, outstanding by rank={self._replicas.outstanding})"

    @property
    def replicas(self) -> dict[int, ModelServed]:
        """What each serving rank said of its replica."""
        with self._changed:
            return self._replicas.served

    @property
    def num_outstanding(self) -> int:
        """Requests that have not ended."""
        return len(self._sent)

    def refresh(self, query_seconds: float = 5.0) -> None:
        """Ask all ranks again what they serve; needed when a rank was replaced.

        Not to be called on the client's link thread, which brings the answers.

        Raises:
            ServeError: no rank serves the model.
        """
        query = ServeQuery(query_id=uuid.uuid4().hex)
        with self._changed:
            self._silent = set(range(self._ranks.num_ranks))
        for rank in range(self._ranks.num_ranks):
            try:
                self._ranks.post(rank, query)
            except RankLostError:
                self._lose(rank, f"rank {rank} was lost")
        with self._changed:
            self._changed.wait_for(lambda: not self._silent, query_seconds)
            if not self._replicas:
                raise ServeError(nobody_serves(self.model, self._ranks.num_ranks))

    def stats(self) -> dict[int, EngineStats]:
        """Ask what the engine of each replica is doing; see `refresh`."""
        self.refresh()
        return {rank: served.stats for rank, served in self.replicas.items()}

    def drain(self, rank: int, timeout_seconds: float | None = None) -> bool:
        """Send a replica nothing more, and wait until what it has is done.

        Returns:
            whether it is done; `drain` again to go on waiting, `undrain` to use it again.
        """
        with self._changed:
            self._replicas.drain(rank)
            return self._changed.wait_for(
                lambda: not self._replicas.outstanding.get(rank), timeout_seconds
            )

    def undrain(self, rank: int) -> None:
        """Send a drained replica requests again."""
        with self._changed:
            self._replicas.undrain(rank)

    def submit(self, prompt: str, **sampling: Any) -> Generation:
        """Send a prompt to the replica with the least unfinished work; never blocks.

        Args:
            prompt: text to continue.
            **sampling: fields of `Sampling`: max_new_tokens, temperature, top_k, top_p, seed, stop.

        Raises:
            ValueError: a sampling value is out of range, or there is no such field.
            Overloaded: every replica has as many requests as it takes.
            ServeError: no replica is left.
        """
        chosen = sampling_of(sampling)
        generation = Generation(
            uuid.uuid4().hex, prompt, chosen, cancel=self._cancel, clock=self._clock
        )
        self._place(generation)
        return generation

    def generate(self, prompts: str | list[str], **sampling: Any) -> list[Generation]:
        """Send prompts, as many at a time as the replicas take, and wait until all have ended.

        Returns:
            One ended `Generation` a prompt, in the order of the prompts; raises as `submit` does.
        """
        wanted = [prompts] if isinstance(prompts, str) else list(prompts)
        made: list[Generation] = []
        try:
            for prompt in wanted:
                made.append(self._submit_waiting(prompt, sampling))  # noqa: PERF401 - kept on errors
            for generation in made:
                generation.wait()
        except BaseException:
            for generation in made:
                generation.cancel()
            raise
        return made

    def close(self) -> None:
        """End what is running as `cancelled` and listen no more."""
        while self._unsubscribe:
            self._unsubscribe.pop()()
        with self._changed:
            left = list(self._sent.values())
        for sent in left:
            self._cancel(sent.generation)
            if self._forget(sent.generation.request_id, sent.rank):
                sent.generation.end("cancelled", "the router was closed")

    def _submit_waiting(self, prompt: str, sampling: dict[str, Any]) -> Generation:
        while True:
            before = self.num_outstanding
            try:
                return self.submit(prompt, **sampling)
            except Overloaded:
                with self._changed:
                    while len(self._sent) >= before:
                        self._changed.wait()

    def _place(self, generation: Generation, *, retried: bool = False) -> None:
        """Send a request to the best replica, and to the next one when that is lost."""
        request = GenerateRequest(
            request_id=generation.request_id,
            model=self.model,
            prompt=generation.prompt,
            sampling=generation.sampling,
        )
        while True:
            with self._changed:
                if not self._replicas:
                    raise ServeError(nobody_serves(self.model, self._ranks.num_ranks))
                rank = self._replicas.assign(request)
                self._sent[request.request_id] = _Sent(generation, rank, retried)
            generation.place(rank)
            try:
                self._ranks.post(rank, request)
            except RankLostError:
                taken_back = self._forget(request.request_id, rank)
                self._lose(rank, f"rank {rank} was lost")
                if taken_back is None:
                    return  # the loss was noticed elsewhere, and the request moved or ended
            else:
                return

    def _cancel(self, generation: Generation) -> None:
        with self._changed:
            sent = self._sent.get(generation.request_id)
            if sent is None:
                return
            sent.cancelled = True
        try:
            self._ranks.post(sent.rank, CancelRequest(request_id=generation.request_id))
        except RankLostError:
            self._lose(sent.rank, f"rank {sent.rank} was lost")

    def _forget(self, request_id: str, rank: int) -> _Sent | None:
        """Take a request of this rank out of the books; None when it is not there any more."""
        with self._changed:
            sent = self._sent.get(request_id)
            if sent is None or sent.rank != rank:
                return None
            del self._sent[request_id]
            self._replicas.release(rank, request_id)
            self._changed.notify_all()
            return sent

    def _on_served(self, rank: int, event: Message) -> None:
        if not isinstance(event, ModelServed) or event.model != self.model:
            return
        with self._changed:
            self._replicas.add(rank, event)
            self._silent.discard(rank)
            self._changed.notify_all()

    def _on_token(self, rank: int, event: Message) -> None:
        if not isinstance(event, TokenEvent):
            return
        with self._changed:
            sent = self._sent.get(event.request_id)
            if sent is None or sent.rank != rank:
                return  # ended before, of another router, or retried elsewhere
            if event.finish_reason is not None:
                self._forget(event.request_id, rank)
        sent.generation.apply(event)

    def _on_unhandled(self, rank: int, event: Message) -> None:
        if not isinstance(event, Unhandled):
            return
        if event.unhandled == "lost":
            self._lose(rank, f"rank {rank} was lost")
        elif event.unhandled in (ServeQuery.kind, GenerateRequest.kind, CancelRequest.kind):
            self._lose(rank, f"rank {rank} serves no model any more")

    def _lose(self, rank: int, what: str) -> None:
        """Retry once what a rank has not answered yet; end the rest as `replica_lost`."""
        with self._changed:
            self._silent.discard(rank)
            self._replicas.remove(rank)
            lost = [sent for sent in self._sent.values() if sent.rank == rank]
            for sent in lost:
                del self._sent[sent.generation.request_id]
            self._changed.notify_all()
        for sent in lost:
            self._retry(sent, what)

    def _retry(self, sent: _Sent, what: str) -> None:
        generation = sent.generation
        again = "send it again; `%distributed status` shows the ranks that are left"
        if sent.cancelled:
            generation.end("cancelled")
            return
        if generation.num_tokens or sent.retried:
            detail = f"{what} after {generation.num_tokens} tokens of this request; {again}"
            generation.end("replica_lost", detail)
            return
        try:
            self._place(generation, retried=True)
        except ServeError as error:
            generation.end("replica_lost", f"{what}, and there was no other replica: {error}")
