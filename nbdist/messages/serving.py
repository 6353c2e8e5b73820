"""Messages of serving: requests down, tokens up (anywhere; stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbdist.messages.wire import Message, message

__all__ = [
    "Sampling",
    "TokenLogprob",
    "EngineStats",
    "ServeQuery",
    "ModelServed",
    "ListServed",
    "ServedList",
    "UnloadModels",
    "ModelsUnloaded",
    "GenerateRequest",
    "CancelRequest",
    "TokenEvent",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: most tokens to add to the prompt.
        temperature: 0 takes the most likely token (greedy); logits are divided by it otherwise.
        top_k: keep only the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; 1.0 keeps all.
        seed: of the request's own random generator; None draws one.
        stop: texts that end the generation; they are not part of the answer.
        repetition_penalty: above 1, logits of tokens in prompt or answer are divided by it when
            positive and multiplied when negative (arXiv 1909.05858); 1.0 is off.
        presence_penalty: taken from the logit of every token that the answer holds already.
        frequency_penalty: taken from it once more for each time that the answer holds it.
        logprobs: report the log-probability of each token and of so many likeliest ones, before
            temperature and penalties; None is off, 0 the chosen token only.
    """

    max_new_tokens: int = 64
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """How likely the model found a token.

    Attributes:
        token_id: the chosen token.
        text: what it decodes to alone; incomplete characters are replaced.
        logprob: its natural log-probability.
        top_ids: the likeliest tokens at this place, best first.
        top_texts: what they decode to.
        top_logprobs: theirs.
    """

    token_id: int
    logprob: float
    text: str = ""
    top_ids: tuple[int, ...] = ()
    top_texts: tuple[str, ...] = ()
    top_logprobs: tuple[float, ...] = ()


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
        num_updates: optimizer steps of the model in training, as long as they are watched.
        held_seconds: how long training waited for this engine.
        training_seconds: from the first of those steps to the last.
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
    num_updates: int = 0
    held_seconds: float = 0.0
    training_seconds: float = 0.0

    @property
    def held_fraction(self) -> float:
        """Share of the time of training that was spent waiting for this engine."""
        return self.held_seconds / self.training_seconds if self.training_seconds else 0.0

    @property
    def paged_waste_fraction(self) -> float:
        """Share of the reserved blocks that holds no token."""
        stored = self.used_bytes - self.shared_bytes
        return 1 - stored / self.paged_bytes if self.paged_bytes else 0.0

    @property
    def contiguous_waste_fraction(self) -> float:
        """Share of full-length slots that would hold no token."""
        return 1 - self.used_bytes / self.contiguous_bytes if self.contiguous_bytes else 0.0


@message("serve_query")
class ServeQuery(Message):
    """Client to rank: do you serve this model? Answered by a `ModelServed`, `gone` when not."""

    query_id: str
    model: str = "default"


@message("model_served")
class ModelServed(Message):
    """Rank to client: a replica of `model` answers requests on this rank, or does so no more.

    Attributes:
        weights_bytes: what the replica's weights take; those of training are not counted.
        state: `serving`; `draining` when it takes no new requests; `gone` when it has ended.
    """

    rank: int
    model: str
    version: int
    max_batch: int
    context_length: int
    query_id: str = ""
    engine: str = "native"
    stats: EngineStats = field(default_factory=EngineStats)
    weights_bytes: int = 0
    state: str = "serving"


@message("list_served")
class ListServed(Message):
    """Client to rank: what do you serve? Answered by one `ServedList`."""

    query_id: str


@message("served_list")
class ServedList(Message):
    """Rank to client: all that this rank serves."""

    rank: int
    query_id: str
    models: tuple[ModelServed, ...] = ()


@message("unload")
class UnloadModels(Message):
    """Client to rank: stop serving. Answered by one `ModelsUnloaded` when all is done.

    Attributes:
        model: which one; None for all.
        now: end running requests as `cancelled` instead of letting them finish.
    """

    query_id: str
    model: str | None = None
    now: bool = False


@message("unloaded")
class ModelsUnloaded(Message):
    """Rank to client: these models are served no more, and their memory is given back.

    Attributes:
        models: their names; empty when the rank served none of them.
        host_bytes: resident memory of the process, before and after.
        device_bytes: what the process holds of its GPU's memory, before and after; 0 without one.
    """

    rank: int
    query_id: str
    models: tuple[str, ...] = ()
    host_bytes: tuple[int, ...] = (0, 0)
    device_bytes: tuple[int, ...] = (0, 0)


@message("generate")
class GenerateRequest(Message):
    """Client to rank: continue `prompt`.

    Attributes:
        timeout_seconds: the request ends this long after it came, with reason `timeout`; None is
            never. A duration, because the clocks of two machines differ.
    """

    request_id: str
    model: str
    prompt: str
    sampling: Sampling = field(default_factory=Sampling)
    timeout_seconds: float | None = None


@message("cancel")
class CancelRequest(Message):
    """Client to rank: end this request at the next step, with finish reason `cancelled`."""

    request_id: str


@message("token")
class TokenEvent(Message):
    """Rank to client: new text of a request.

    Attributes:
        index: number of tokens generated so far, this event's included.
        text: the text added since the last event; may be empty inside a multi-byte character.
        finish_reason: None, or how the request ended: `stop`, `length`, `cancelled`, `timeout`,
            `overloaded`, `error`. Exactly one event of a request has it, and it is the last.
        detail: for a bad ending, what was wrong with the request and what to do; for `length`, when
            the model's context was full before `max_new_tokens` were made.
        batch_size: rows that ran in the same step.
        logprobs: of the new tokens, when they were asked for.
    """

    request_id: str
    rank: int
    index: int
    text: str
    finish_reason: str | None = None
    detail: str = ""
    batch_size: int = 1
    num_prompt_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
