"""Every value that crosses a process border, and its form on the wire (anywhere; stdlib only).

A message is a frozen, slotted dataclass registered under a short kind. `to_wire` makes one JSON
object of it, `from_wire` makes the message again. Nothing but JSON is ever read from the wire.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

__all__ = [
    "Message",
    "to_wire",
    "from_wire",
    "topic_of",
    "StatusQuery",
    "RankInfo",
    "Stage",
    "JoinGroup",
    "JoinFailed",
    "AbortGroup",
    "Shutdown",
    "RunCell",
    "Interrupt",
    "Unhandled",
    "CellEvent",
    "RankStream",
    "RankDisplay",
    "RankError",
    "RankDone",
    "Sampling",
    "ServeQuery",
    "ModelServed",
    "GenerateRequest",
    "CancelRequest",
    "TokenEvent",
]

_KINDS: dict[str, type[Message]] = {}
_M = TypeVar("_M", bound="Message")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages; `kind` is its name on the wire."""

    kind: ClassVar[str] = ""


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def _message(kind: str) -> typing.Callable[[type[_M]], type[_M]]:
    def register(cls: type[_M]) -> type[_M]:
        made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        made.kind = kind
        _KINDS[kind] = made
        return made

    return register


def topic_of(message: Message) -> str:
    """Return the id that ties a message to its conversation, or an empty string."""
    for name in ("cell_id", "request_id", "query_id"):
        if value := getattr(message, name, ""):
            return str(value)
    return ""


def to_wire(message: Message) -> bytes:
    """Return the JSON bytes of a message."""
    body = dataclasses.asdict(message)
    body["kind"] = message.kind
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


def from_wire(data: bytes) -> Message:
    """Return the message that `to_wire` made.

    Raises:
        ValueError: the bytes are not a known message; the text names the kind and the fields.
    """
    body = json.loads(data.decode("utf-8", "surrogatepass"))
    kind = body.pop("kind", None) if isinstance(body, dict) else None
    cls = _KINDS.get(kind or "")
    if cls is None:
        raise ValueError(f"message kind {kind!r} is unknown; known kinds: {sorted(_KINDS)}")
    return typing.cast("Message", _build(cls, body))


def _build(cls: type[Any], body: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}
    if unknown := set(body) - names:
        raise ValueError(f"{cls.__name__} has no field {sorted(unknown)}; it has {sorted(names)}")
    try:
        return cls(**{name: _restore(hints[name], value) for name, value in body.items()})
    except TypeError as error:
        raise ValueError(f"{cls.__name__} cannot be built from {sorted(body)}: {error}") from error


def _restore(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(typing.cast("type[Any]", hint), value)
    origin = typing.get_origin(hint)
    if origin is tuple:
        inner = typing.get_args(hint)[0]
        return tuple(_restore(inner, item) for item in value)
    return value


# --- the link: client and ranks -------------------------------------------------------------


@_message("status_query")
class StatusQuery(Message):
    """Client to rank: who are you and what do you run? The rank answers with its `RankInfo`."""

    query_id: str


@_message("rank_info")
class RankInfo(Message):
    """Rank to client: who a rank is. Memory is the device's for a GPU, the host's for a CPU.

    Attributes:
        generation: of the process group the rank is in; -1 before the first.
        running_cell: id of the cell that runs; empty when idle.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    pid: int
    device: str
    device_name: str = ""
    memory_bytes: int = 0
    engine_id: int = -1
    generation: int = -1
    running_cell: str = ""
    query_id: str = ""


@_message("stage")
class Stage(Message):
    """Rank to client: what the rank is doing while the world starts."""

    rank: int
    text: str
    failed: bool = False


@_message("join_group")
class JoinGroup(Message):
    """Client to rank: leave the process group you are in and join this generation of it.

    Answered by `RankInfo` once a collective of the new group has been verified, or `JoinFailed`.

    Attributes:
        store: path of the file that the group's rendezvous store lives in.
    """

    query_id: str
    generation: int
    store: str
    timeout_seconds: float


@_message("join_failed")
class JoinFailed(Message):
    """Rank to client: the rank is in no process group; `reason` says why."""

    rank: int
    query_id: str
    generation: int
    reason: str


@_message("abort_group")
class AbortGroup(Message):
    """Client to rank: free whatever waits in a collective of this generation, and no later one."""

    generation: int


@_message("shutdown")
class Shutdown(Message):
    """Client to rank: end the process."""


@_message("run")
class RunCell(Message):
    """Client to rank: run `source` in the rank's namespace.

    Attributes:
        execution_count: the notebook's cell number, shown in tracebacks; 0 keeps the rank's own.
        ranks: every rank that runs the cell.
    """

    cell_id: str
    source: str
    ranks: tuple[int, ...]
    execution_count: int = 0


@_message("interrupt")
class Interrupt(Message):
    """Client to rank: stop the cell of this id, and no other."""

    cell_id: str


@_message("unhandled")
class Unhandled(Message):
    """Rank to client: nothing on this rank handles messages of this kind.

    Attributes:
        topic: the id of the message, as `topic_of` gives it.
    """

    rank: int
    unhandled: str
    topic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEvent(Message):
    """Base of a rank's events of one cell; `seq` counts them from 0."""

    rank: int
    cell_id: str
    seq: int


@_message("stream")
class RankStream(CellEvent):
    """Rank to client: text that the rank wrote since its last event."""

    stream: str
    text: str


@_message("display")
class RankDisplay(CellEvent):
    """Rank to client: one Jupyter display message.

    Attributes:
        action: `display_data`, `update_display_data`, `execute_result` or `clear_output`.
        content: the content of the Jupyter message of that name.
    """

    action: str
    content: dict[str, Any]


@_message("error")
class RankError(CellEvent):
    """Rank to client: the exception that ended the rank's cell."""

    name: str
    value: str
    traceback: str
    at_seconds: float = 0.0


@_message("done")
class RankDone(CellEvent):
    """Rank to client: the cell has ended on this rank; nothing of it comes after.

    Attributes:
        status: `ok`, `error`, `interrupted`, `busy` (another cell runs; nothing was run) or
            `lost` (made by the client when the rank's process is gone).
    """

    status: str
    seconds: float
    detail: str = ""


# --- serving --------------------------------------------------------------------------------


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


@_message("serve_query")
class ServeQuery(Message):
    """Client to rank: which models do you serve? Answered by one `ModelServed` a model."""

    query_id: str


@_message("model_served")
class ModelServed(Message):
    """Rank to client: a replica of `model` answers requests on this rank."""

    rank: int
    model: str
    version: int
    max_batch: int
    context_length: int
    query_id: str = ""


@_message("generate")
class GenerateRequest(Message):
    """Client to rank: continue `prompt`."""

    request_id: str
    model: str
    prompt: str
    sampling: Sampling = field(default_factory=Sampling)


@_message("cancel")
class CancelRequest(Message):
    """Client to rank: end this request at the next step, with finish reason `cancelled`."""

    request_id: str


@_message("token")
class TokenEvent(Message):
    """Rank to client: new text of a request.

    Attributes:
        index: number of tokens generated so far, this event's included.
        text: the text added since the last event; may be empty inside a multi-byte character.
        finish_reason: None, or how the request ended: `stop`, `length`, `cancelled`, `error`.
            Exactly one event of a request has it, and it is the last.
        detail: for `error`, what was wrong with the request and what to do.
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
