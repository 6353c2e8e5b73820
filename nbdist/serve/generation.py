"""A request as its sender sees it: text as it comes, numbers, one ending (client; torch-free)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias

from nbdist.errors import ServeError

if TYPE_CHECKING:
    from nbdist.messages import Sampling, TokenEvent, TokenLogprob

__all__ = ["FinishReason", "Generation"]

_log = logging.getLogger(__name__)

FinishReason: TypeAlias = Literal[
    "stop", "length", "cancelled", "timeout", "overloaded", "replica_lost", "error"
]
_RAISED = ("overloaded", "replica_lost", "error")  # endings without an answer
EventHandler: TypeAlias = Callable[["Generation"], None]


class Generation:
    """One request and its answer; made by `Router.submit`, safe to read from any thread.

    Iterating gives pieces of text as they arrive and ends with the answer; joined they are
    `text`. A Ctrl-C while waiting cancels the request.

    Attributes:
        prompt: what is continued.
        sampling: how tokens are chosen.
        request_id: its name; unique.
        timeout_seconds: how long it may take from `submit`; None for as long as it takes.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str,
        sampling: Sampling,
        *,
        cancel: Callable[[Generation], None],
        timeout_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.timeout_seconds = timeout_seconds
        self._cancel = cancel
        self._clock = clock
        self._changed = threading.Condition()
        # held while handlers are told, so that each of them sees the ending exactly once
        self._telling = threading.RLock()
        self._handlers: list[EventHandler] = []
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_taken = 0
        self._last: TokenEvent | None = None
        self._finish_reason: FinishReason | None = None
        self._detail = ""
        self._rank = -1
        self._started_at = clock()
        self._first_at: float | None = None
        self._last_at = self._started_at

    def __repr__(self) -> str:
        state = self.finish_reason or "running"
        return f"Generation({state}, num_tokens={self.num_tokens}, text={self.text!r})"

    def __iter__(self) -> Iterator[str]:
        """Yield new text as it arrives, from the start.

        Raises:
            ServeError: the request ended by `overloaded`, `error` or `replica_lost`.
        """
        seen = 0
        while True:
            piece, seen, ended = self._next(seen)
            if piece:
                yield piece
            elif ended:
                self._check()
                return

    @property
    def text(self) -> str:
        """The answer so far, without the prompt."""
        return "".join(self._pieces)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """How likely each token was, when `logprobs` was asked for."""
        return list(self._logprobs)

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it runs, then one of `FinishReason`; set once."""
        return self._finish_reason

    @property
    def detail(self) -> str:
        """What the ending says: for a bad one, what was wrong and what to do."""
        return self._detail

    @property
    def rank(self) -> int:
        """The rank that runs it."""
        return self._rank

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return self._last.index if self._last else 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 until the first event."""
        return self._last.num_prompt_tokens if self._last else 0

    @property
    def batch_size(self) -> int:
        """Requests that ran in the newest step; 0 until the first event."""
        return self._last.batch_size if self._last else 0

    @property
    def first_token_seconds(self) -> float | None:
        """From `submit` to the first token; None before it."""
        return None if self._first_at is None else self._first_at - self._started_at

    @property
    def seconds(self) -> float:
        """From `submit` to the newest event."""
        return self._last_at - self._started_at

    @property
    def tokens_per_second(self) -> float | None:
        """Rate after the first token; None before the second."""
        if self._first_at is None or self.num_tokens < 2 or self._last_at <= self._first_at:
            return None
        return (self.num_tokens - 1) / (self._last_at - self._first_at)

    def result(self, timeout_seconds: float | None = None) -> str:
        """Wait for the ending and return the text.

        Raises:
            ServeError: the request ended by `overloaded`, `error` or `replica_lost`.
            TimeoutError: it has not ended in this time; it goes on, `cancel` ends it.
        """
        if not self.wait(timeout_seconds):
            raise TimeoutError(
                f"the request has {self.num_tokens} tokens after timeout_seconds="
                f"{timeout_seconds} and goes on; wait longer, or end it with `cancel()`"
            )
        self._check()
        return self.text

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the ending, whatever it is; return whether it has come."""
        try:
            with self._changed:
                return self._changed.wait_for(
                    lambda: self._finish_reason is not None, timeout_seconds
                )
        except KeyboardInterrupt:
            self.cancel()
            raise

    def remaining_seconds(self, grace_seconds: float = 0.0) -> float | None:
        """Return the time that is left to it, at least 0; None without `timeout_seconds`."""
        if self.timeout_seconds is None:
            return None
        end = self._started_at + self.timeout_seconds + grace_seconds
        return max(0.0, end - self._clock())

    def cancel(self) -> None:
        """End the request at the replica's next step; nothing happens when it has ended."""
        if self._finish_reason is None:
            self._cancel(self)

    def take_logprobs(self) -> list[TokenLogprob]:
        """Return those that came since the last call (for a stream)."""
        with self._changed:
            taken = self._logprobs[self._num_taken :]
            self._num_taken += len(taken)
            return taken

    def on_event(self, handler: EventHandler) -> None:
        """Call `handler(generation)` after each event, and at once when it has ended already.

        It is called exactly once with the ending, by one of the client's threads: it must return
        at once, and not print.
        """
        with self._changed:
            ended = self._finish_reason is not None
            if not ended:
                self._handlers.append(handler)
        if ended:
            handler(self)

    def place(self, rank: int) -> None:
        """Note the rank that runs it (for the router)."""
        self._rank = rank

    def apply(self, event: TokenEvent) -> None:
        """Take an event of the replica (for the router)."""
        with self._telling:
            if self._taken(event):
                self._tell(ended=False)
            if event.finish_reason is not None:
                self.end(event.finish_reason, event.detail)  # type: ignore[arg-type]

    def _taken(self, event: TokenEvent) -> bool:
        """Note what an event brings; whether the handlers are to be told of it now."""
        with self._changed:
            if self._finish_reason is not None:
                return False
            self._last_at = self._clock()
            if event.index > 0 and self._first_at is None:
                self._first_at = self._last_at
            self._last = event
            self._logprobs.extend(event.logprobs)
            if event.text:
                self._pieces.append(event.text)
        return event.finish_reason is None

    def end(self, finish_reason: FinishReason, detail: str = "") -> None:
        """Set the ending, unless there is one (for the router)."""
        with self._telling:
            with self._changed:
                if self._finish_reason is not None:
                    return
                self._detail = detail
                self._finish_reason = finish_reason
                self._last_at = self._clock()
            self._tell(ended=True)

    def _tell(self, *, ended: bool) -> None:
        with self._changed:
            self._changed.notify_all()
            handlers = list(self._handlers)
        for handler in handlers:
            if not ended and self._finish_reason is not None:
                return  # a handler ended it, and all have been told
            try:
                handler(self)
            except Exception:  # noqa: BLE001 - a handler's fault must not end the link thread
                _log.exception("a handler of request %s failed", self.request_id)

    def _next(self, seen: int) -> tuple[str, int, bool]:
        def ready() -> bool:
            return len(self._pieces) > seen or self._finish_reason is not None

        try:
            with self._changed:
                self._changed.wait_for(ready)
                piece = "".join(self._pieces[seen:])
                return piece, len(self._pieces), self._finish_reason is not None
        except KeyboardInterrupt:
            self.cancel()
            raise

    def _check(self) -> None:
        if self._finish_reason in _RAISED:
            raise ServeError(f"the request ended by `{self._finish_reason}`: {self._detail}")
