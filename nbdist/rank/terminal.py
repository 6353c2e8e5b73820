"""Makes rich draw as in a terminal: its own way in notebooks needs widgets of the kernel (rank)."""

from __future__ import annotations

import collections
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

__all__ = ["draw_rich_as_text"]

_MODULE = "rich.console"


class _Loader(importlib.abc.Loader):
    """Loads rich's console as ever, then tells it where it is."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _adapt(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def draw_rich_as_text() -> None:
    """Let rich, now or when it is imported, write text with cursor movements.

    What it draws is then text of the rank like any other; the client shows its bars in place.
    """
    if _MODULE in sys.modules:
        _adapt(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Finder())


def _adapt(console: ModuleType) -> None:
    console._is_jupyter = lambda: False  # type: ignore[attr-defined]
    # For rich alone: children of the rank need not believe in a terminal.
    is_terminal = {"TTY_COMPATIBLE": "1", "FORCE_COLOR": "1"}
    console.Console._environ = collections.ChainMap(is_terminal, os.environ)
