"""Messages of serving: requests down, tokens up (anywhere; stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbdist.messages.wire import Message, message

__all__ = [
    "Sampling",
    "ServeQuery",
    "ModelServed",
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
    """

    max_new_tokens: int = 64
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


@message("serve_query")
class ServeQuery(Message):
    """Client to rank: which models do you serve? Answered by one `ModelServed` a model."""

    query_id: str


@message("model_served")
class ModelServed(Message):
    """Rank to client: a replica of `model` answers requests on this rank."""

    rank: int
    model: str
    version: int
    max_batch: int
    context_length: int
    query_id: str = ""


@message("generate")
class GenerateRequest(Message):
    """Client to rank: continue `prompt`."""

    request_id: str
    model: str
    prompt: str
    sampling: Sampling = field(default_factory=Sampling)


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
        finish_reason: None, or how the request ended: `stop`, `length`, `cancelled`, `error`.
            Exactly one event of a request has it, and it is the last.
        detail: for `error`, what was wrong with the request and what to do; for `length`, when
            the model's context was full before `max_new_tokens` were made.
        batch_size: rows that ran in the same step.
    """

    request_id: str
    rank: int
    index: int
    text: str
    finish_reason: str | None = None
    detail: str = ""
    batch_size: int = 1
    num_prompt_tokens: int = 0
