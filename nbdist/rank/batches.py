"""Runs the items of `World.map` that this rank was given (rank)."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

__all__ = ["Failure", "run_batch"]

Failure = tuple[str, str, str]  # class name, text and traceback of what an item has raised

_functions: dict[str, Callable[[Any], Any]] = {}  # of the last map, by its name


def run_batch(
    name: str, function: bytes | None, items: Sequence[bytes]
) -> tuple[list[bytes], Failure | None] | None:
    """Call a function on each item until one fails (main thread).

    SIGINT ends the batch with the item that it meets.

    Args:
        name: of the map.
        function: pickled; None when this rank has it already.
        items: pickled, one by one.

    Returns:
        Pickled results of the items before the first that failed, and how that one failed; None
        when this rank does not have the function.
    """
    if function is not None:
        _functions.clear()
        _functions[name] = cloudpickle.loads(function)
    if name not in _functions:
        return None
    results: list[bytes] = []
    listening = True

    def on_sigint(_signum: int, _frame: FrameType | None) -> None:
        if listening:  # a second signal must not cut short the answer to the first
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_sigint)
    try:
        try:
            for item in items:
                value = _functions[name](cloudpickle.loads(item))
                results.append(cloudpickle.dumps(value))
        finally:
            listening = False
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - told to the client, with its item
        listening = False
        text = "".join(traceback.format_exception(error)).rstrip()
        return results, (type(error).__name__, str(error), text)
    finally:
        signal.signal(signal.SIGINT, before)
    return results, None
