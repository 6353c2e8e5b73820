"""Requests to the least loaded replica, events back to their senders (client; torch-free)."""

from __future__ import annotations

import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from nbdist.errors import RankLostError, ServeError
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
from nbdist.serve.deadlines import DeadlineWatch
from nbdist.serve.generation import Generation
from nbdist.serve.ledger import Ledger, Sent
from nbdist.serve.many import generate_all
from nbdist.serve.request import check_timeout, sampling_of
from nbdist.serve.roster import Roster
from nbdist.serve.unloading import unload

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.messages import ModelsUnloaded
    from nbdist.serve.ports import RanksPort

__all__ = ["Router"]


class Router:
    """The client's door to a model that ranks serve.

    Args:
        ranks: the way to the ranks.
        model: the name given to `serve`.
        query_seconds: how long to wait for the ranks to say what they serve.
        max_waiting: most requests a replica has from this router beyond its `max_batch`.
        clock: monotonic seconds, for the numbers of a `Generation` and its deadline.

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
        self._roster = Roster(
            ranks, model, max_waiting=max_waiting, changed=self._changed, on_lost=self._lose
        )
        self._sent = Ledger(self._changed, self._roster.books)
        self._closed = False
        self._deadlines = DeadlineWatch(self.end_overdue, f"nbdist-deadlines-{model}")
        self._unsubscribe = [
            ranks.subscribe(ModelServed, self._roster.on_served),
            ranks.subscribe(TokenEvent, self._on_token),
            ranks.subscribe(Unhandled, self._on_unhandled),
        ]
        try:
            self.refresh(query_seconds)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"Router(model={self.model!r}, outstanding={self._roster.books.outstanding})"

    @property
    def replicas(self) -> dict[int, ModelServed]:
        """What each serving rank said of its replica."""
        with self._changed:
            return self._roster.books.served

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
        self._roster.refresh(query_seconds)

    def stats(self) -> dict[int, EngineStats]:
        """Ask what the engine of each replica is doing; see `refresh`."""
        self.refresh()
        return {rank: served.stats for rank, served in self.replicas.items()}

    def drain(self, rank: int, timeout_seconds: float | None = None) -> bool:
        """Send a replica nothing more, and wait until what it has is done.

        Returns:
            whether it is done; `drain` again to go on waiting, `undrain` to use it again.
        """
        return self._roster.drain(rank, timeout_seconds)

    def undrain(self, rank: int) -> None:
        """Send a drained replica requests again."""
        self._roster.undrain(rank)

    def submit(
        self, prompt: str, *, timeout_seconds: float | None = None, **sampling: Any
    ) -> Generation:
        """Send a prompt to the replica with the least unfinished work; never blocks.

        Args:
            prompt: text to continue.
            timeout_seconds: the request ends after it with reason `timeout`, keeping its text;
                None lets it take as long as it takes.
            **sampling: fields of `Sampling`: max_new_tokens, temperature, top_k, top_p, seed, stop.

        Raises:
            ValueError: a sampling value is out of range, or there is no such field.
            Overloaded: every replica has as many requests as it takes.
            ServeError: no replica is left.
        """
        chosen = sampling_of(sampling)
        check_timeout(timeout_seconds)
        generation = Generation(
            uuid.uuid4().hex,
            prompt,
            chosen,
            cancel=self._cancel,
            timeout_seconds=timeout_seconds,
            clock=self._clock,
        )
        self._place(generation)
        if timeout_seconds is not None:
            self._deadlines.wake()
        return generation

    def generate(self, prompts: str | list[str], **sampling: Any) -> list[Generation]:
        """Send prompts, as many at a time as the replicas take, and wait until all have ended.

        Returns:
            One ended `Generation` a prompt, in the order of the prompts; raises as `submit` does.
        """
        wanted = [prompts] if isinstance(prompts, str) else list(prompts)
        return generate_all(self, wanted, sampling)

    def wait_for_fewer(self, number: int) -> None:
        """Wait until fewer requests than this have not ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_outstanding < number)

    def unload(
        self, *, now: bool = False, timeout_seconds: float | None = None
    ) -> dict[int, ModelsUnloaded]:
        """Have the ranks serve this model no more; see `nbdist.serve.unloading.unload`."""
        return unload(self._ranks, self.model, now=now, timeout_seconds=timeout_seconds)

    def end_overdue(self) -> float | None:
        """End what a rank should have ended a second ago; returns the seconds to the next one.

        A thread of the router calls it in time.
        """
        late, next_seconds = self._sent.overdue()
        while late:  # again: a loss noticed here may have moved some to another rank
            for sent in late:
                self._end_hung(sent)
            late, next_seconds = self._sent.overdue()
        return next_seconds

    def close(self) -> None:
        """End what is running as `cancelled` and listen no more."""
        while self._unsubscribe:
            self._unsubscribe.pop()()
        self._deadlines.close()
        with self._changed:
            self._closed = True  # nothing is placed from here on, so all that is sent is ended
        for sent in self._sent.all():
            self._cancel(sent.generation)
            if self._sent.forget(sent.generation.request_id, sent.rank):
                sent.generation.end("cancelled", "the router was closed")

    def _place(self, generation: Generation, *, retried: bool = False) -> None:
        """Send a request to the best replica, and to the next one when that is lost."""
        request = GenerateRequest(
            request_id=generation.request_id,
            model=self.model,
            prompt=generation.prompt,
            sampling=generation.sampling,
            timeout_seconds=generation.remaining_seconds(),
        )
        while True:
            with self._changed:
                if self._closed:
                    raise ServeError("the router is closed; make a new one: `Router(world)`")
                self._roster.check()
                rank = self._roster.books.assign(request)
                self._sent.add(Sent(generation, rank, retried))
            generation.place(rank)
            try:
                self._ranks.post(rank, request)
            except RankLostError:
                taken_back = self._sent.forget(request.request_id, rank)
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
        self._post_cancel(generation.request_id, sent.rank)

    def _post_cancel(self, request_id: str, rank: int) -> None:
        try:
            self._ranks.post(rank, CancelRequest(request_id=request_id))
        except RankLostError:
            self._lose(rank, f"rank {rank} was lost")

    def _end_hung(self, sent: Sent) -> None:
        """End a request without its rank, and tell the rank, should it wake up."""
        generation, rank = sent.generation, sent.rank
        if self._sent.forget(generation.request_id, rank) is None:
            return
        detail = (
            f"rank {rank} did not end the request {generation.timeout_seconds} s after it was "
            "sent; `%distributed status` shows whether the rank hangs"
        )
        generation.end("timeout", detail)
        self._post_cancel(generation.request_id, rank)

    def _on_token(self, rank: int, event: Message) -> None:
        if not isinstance(event, TokenEvent):
            return
        with self._changed:
            sent = self._sent.get(event.request_id)
            if sent is None or sent.rank != rank:
                return  # ended before, of another router, or retried elsewhere
            if event.finish_reason is not None:
                self._sent.forget(event.request_id, rank)
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
            self._roster.remove(rank)
            lost = self._sent.forget_rank(rank)
        for sent in lost:
            self._retry(sent, what)

    def _retry(self, sent: Sent, what: str) -> None:
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
