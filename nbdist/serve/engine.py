"""What every engine does: token ids in and out, in short steps (torch-free, anywhere).

An engine knows no text, no thread and no client. `Batcher` stands above it and makes text of its
tokens; one thread calls both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from nbdist.messages import Sampling, TokenLogprob

__all__ = ["Engine", "EngineLimits", "EngineRequest", "EngineStats", "TokenOutput"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine is doing; all counts since it was made unless they say `now`.

    Attributes:
        num_running: requests in the batch now.
        num_waiting: requests that wait now.
        num_steps: steps done.
        num_preempted: how often a request's cache was taken away to be computed again.
        used_bytes: cache bytes of all requests' tokens now; a shared one counts for each.
        shared_bytes: how many of them are stored once for several requests.
        paged_bytes: cache bytes that are reserved for them now, in whole blocks.
        contiguous_bytes: what a layout of one full-length slot a request would reserve now.
        capacity_bytes: bytes of the whole cache.
        num_prompt_tokens: tokens of all prompts that began to run.
        num_prefix_tokens: those of them that were found in the cache.
        num_drafted: tokens that were guessed ahead.
        num_accepted: guesses that held.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_preempted: int = 0
    used_bytes: int = 0
    shared_bytes: int = 0
    paged_bytes: int = 0
    contiguous_bytes: int = 0
    capacity_bytes: int = 0
    num_prompt_tokens: int = 0
    num_prefix_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def paged_waste_fraction(self) -> float:
        """Share of the reserved blocks that holds no token."""
        stored = self.used_bytes - self.shared_bytes
        return 1 - stored / self.paged_bytes if self.paged_bytes else 0.0

    @property
    def contiguous_waste_fraction(self) -> float:
        """Share of full-length slots that would hold no token."""
        return 1 - self.used_bytes / self.contiguous_bytes if self.contiguous_bytes else 0.0


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
