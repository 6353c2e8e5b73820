"""What every engine does: token ids in and out, in short steps (torch-free, anywhere).

An engine knows no text, no thread and no client. `Batcher` stands above it and makes text of its
tokens; one thread calls both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from nbdist.messages import EngineStats, Sampling, TokenLogprob

__all__ = ["Engine", "EngineLimits", "EngineRequest", "TokenOutput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt to continue.

    Attributes:
        request_id: unique among those that have not ended.
        prompt_ids: at least one token.
        sampling: how tokens are chosen; its `stop` texts are the batcher's affair.
        end_token_id: ends the answer; None for none.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    end_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """New tokens of one request.

    Attributes:
        token_ids: in order; empty when the request ends without a new one. An end token is the
            last of them.
        finish_reason: None while it goes on. Exactly one output of a request has one, unless it
            was cancelled, and it is the last.
        detail: for `error`, what happened.
        batch_size: requests of the same step.
        logprobs: one a token when they were asked for.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "error"] | None = None
    detail: str = ""
    batch_size: int = 1
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine can hold.

    Attributes:
        vocab_size: token ids are below it.
        context_length: most tokens of a request, prompt and answer.
        max_batch: most requests that run together.
        capacity_tokens: most tokens that the cache holds, all requests together.
    """

    vocab_size: int
    context_length: int
    max_batch: int
    capacity_tokens: int


class Engine(Protocol):
    """Runs many requests on one model; all calls come from one thread."""

    name: str
    limits: EngineLimits

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Take a request.

        Raises:
            ValueError: it can never run here; nothing else is touched.
            Overloaded: too many requests wait.
        """
        ...

    def cancel(self, request_id: str) -> bool:
        """Let go of a request; no output of it follows. False when it is not known."""
        ...

    def step(self) -> list[TokenOutput]:
        """Do a bounded piece of work and return the new tokens."""
        ...

    def wait_seconds(self) -> float | None:
        """How long there is nothing to do: None until a request comes, 0 when there is work."""
        ...

    def stats(self) -> EngineStats:
        """Return what it is doing."""
        ...

    def new_version(self) -> None:
        """The weights have changed in place: what was cached for new requests is void.

        Running requests keep their cache and go on with the new weights.
        """
        ...

    def close(self) -> None:
        """Give back threads and memory; requests that run get no more output."""
        ...
