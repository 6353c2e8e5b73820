"""The form of messages on the wire (anywhere; standard library only).

A message is a frozen, slotted dataclass registered under a short kind. `to_wire` makes one JSON
object of it, `from_wire` makes the message again. Nothing but JSON is ever read from the wire.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

__all__ = ["Message", "message", "to_wire", "from_wire", "topic_of"]

_KINDS: dict[str, type[Message]] = {}
_M = TypeVar("_M", bound="Message")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages; `kind` is its name on the wire."""

    kind: ClassVar[str] = ""


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def message(kind: str) -> typing.Callable[[type[_M]], type[_M]]:
    """Make a frozen dataclass of a class and register it under its kind."""

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
