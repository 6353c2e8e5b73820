"""Puts the checker in front of torch's collectives, wherever they were imported by name (rank)."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from nbdist.rank.checker import Checker
from nbdist.rank.collectives import FUNCTIONAL, PLAIN, Reader

__all__ = ["install"]


def install(checker: Checker) -> None:
    """Wrap torch's collectives; called once, before user code has run."""
    from torch.distributed import _functional_collectives, distributed_c10d

    inside = threading.local()
    replaced: dict[int, tuple[Any, Any]] = {}
    for name, reader in PLAIN.items():
        original = getattr(distributed_c10d, name, None)
        if original is not None:
            replaced[id(original)] = (original, _wrap(original, reader, checker, inside))
    for module_name, module in list(sys.modules.items()):
        # The compiler looks originals up in that one module; it reaches them through the wrapper.
        if module_name.startswith("torch.distributed") and module is not _functional_collectives:
            for name, value in list(vars(module).items()):
                if replaced.get(id(value), (None,))[0] is value is not None:
                    setattr(module, name, replaced[id(value)][1])
    for name, reader in FUNCTIONAL.items():
        original = getattr(_functional_collectives, name, None)
        if original is not None:
            wrapper = _wrap(original, reader, checker, inside, functional=True)
            setattr(_functional_collectives, name, wrapper)
    waiter = _wrap_wait(_functional_collectives.wait_tensor, checker)
    _functional_collectives.wait_tensor = waiter


def _wrap(
    original: Callable[..., Any],
    reader: Reader,
    checker: Checker,
    inside: threading.local,
    *,
    functional: bool = False,
) -> Callable[..., Any]:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.compiler import is_compiling

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        # A collective that another one is made of is part of that one.
        if is_compiling() or getattr(inside, "yes", False):
            return original(*args, **kwargs)
        try:
            seen = reader(*args, **kwargs)
        except (TypeError, ValueError, AttributeError, RuntimeError, LookupError):
            # Arguments that cannot be read: torch has the better words for it.
            return original(*args, **kwargs)
        wait = None if isinstance(seen.tensor, FakeTensor) else checker.enter(seen)
        if wait is None:
            return original(*args, **kwargs)
        result = None
        inside.yes = True
        try:
            result = original(*args, **kwargs)
        finally:
            inside.yes = False
            checker.leave(wait, result, functional=functional)
        return result

    return checked


def _wrap_wait(original: Callable[..., Any], checker: Checker) -> Callable[..., Any]:
    from torch.compiler import is_compiling

    @functools.wraps(original)
    def watched(tensor: Any) -> Any:
        if is_compiling():
            return original(tensor)
        checker.wait_begins()
        try:
            return original(tensor)
        finally:
            checker.wait_ends()

    return watched
