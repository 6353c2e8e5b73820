"""Completion and inspection that run no code of the user (rank).

Used while a cell runs: attributes are read from dictionaries and classes only, so that no
property, `__getattr__` or `__dir__` runs beside the cell on another thread.
"""

from __future__ import annotations

import builtins
import inspect as std_inspect
import keyword
import re
import types
from typing import Any

__all__ = ["complete", "inspect"]

_WORD = re.compile(r"(?:[^\W\d]\w*\.)*(?:[^\W\d]\w*)?$")
_MISSING = object()
_HAVE_DOC = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")  # where torch.nn.Module keeps attributes


def complete(names: dict[str, Any], source: str, cursor: int) -> dict[str, Any]:
    """Return the content of a `complete_reply` for the dotted name that ends at the cursor."""
    word = _word_before(source, cursor)
    path, _, prefix = word.rpartition(".")
    if path:
        value = _find(names, path)
        known = set() if value is _MISSING else set(_attributes(value))
    else:
        known = {*list(names), *vars(builtins), *keyword.kwlist} if prefix else set()
    matches = sorted(
        f"{path}.{name}" if path else name
        for name in known
        if name.startswith(prefix) and (prefix.startswith("_") or not name.startswith("_"))
    )
    return {
        "status": "ok",
        "matches": matches,
        "cursor_start": cursor - len(word),
        "cursor_end": cursor,
        "metadata": {},
    }


def inspect(names: dict[str, Any], source: str, cursor: int) -> dict[str, Any]:
    """Return the content of an `inspect_reply`: type, signature of a function, docstring."""
    rest = re.match(r"\w*", source[cursor:])
    word = _word_before(source, cursor) + (rest.group() if rest else "")
    value = _find(names, word) if word else _MISSING
    if value is _MISSING:
        return {"status": "ok", "found": False, "data": {}, "metadata": {}}
    lines = [f"Type: {type(value).__name__}"]
    if isinstance(value, types.FunctionType):
        lines.append(f"Signature: {word}{std_inspect.signature(value)}")
    if isinstance(value, _HAVE_DOC):
        text: Any = value.__doc__
    elif isinstance(value, type):
        text = vars(value).get("__doc__")
    else:
        text = std_inspect.getattr_static(type(value), "__doc__", None)
    if isinstance(text, str):
        lines.append(f"Docstring: {std_inspect.cleandoc(text)}")
    lines.append("(a cell runs on the rank: this is what can be read meanwhile)")
    data = {"text/plain": "\n".join(lines)}
    return {"status": "ok", "found": True, "data": data, "metadata": {}}


def _word_before(source: str, cursor: int) -> str:
    found = _WORD.search(source[:cursor])
    return found.group() if found else ""


def _find(names: dict[str, Any], path: str) -> Any:
    first, *rest = path.split(".")
    value = names.get(first, vars(builtins).get(first, _MISSING))
    for name in rest:
        if value is _MISSING:
            return value
        value = _attributes(value).get(name, _MISSING)
        if isinstance(value, property | types.GetSetDescriptorType | types.MemberDescriptorType):
            return _MISSING
    return value


def _attributes(value: Any) -> dict[str, Any]:
    """Return what is stored under a value and its classes, by name."""
    found: dict[str, Any] = {}
    for cls in reversed(type(value).__mro__):
        found.update(vars(cls))
    if isinstance(value, type):
        for cls in reversed(type.mro(value)):
            found.update(vars(cls))
        return found
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return found
    if type(own) is dict:
        found.update(own.copy())
        for part in _MODULE_PARTS:
            if type(own.get(part)) is dict:
                found.update(own[part].copy())
    return found
