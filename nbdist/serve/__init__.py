"""Inference on resident models: requests, batches, tokens (scheduler torch-free; runner on ranks).

Importing it brings no torch: the client's kernel stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.serve.batched_module import BatchedModule as BatchedModule
    from nbdist.serve.generation import Generation as Generation
    from nbdist.serve.http import HttpServer as HttpServer
    from nbdist.serve.http import serve_http as serve_http
    from nbdist.serve.oneshot import generate as generate
    from nbdist.serve.replica import Replica as Replica
    from nbdist.serve.replica import serve as serve
    from nbdist.serve.router import Router as Router

_HOMES = {
    "serve": "nbdist.serve.replica",
    "Replica": "nbdist.serve.replica",
    "Router": "nbdist.serve.router",
    "Generation": "nbdist.serve.generation",
    "generate": "nbdist.serve.oneshot",
    "BatchedModule": "nbdist.serve.batched_module",
    "serve_http": "nbdist.serve.http",
    "HttpServer": "nbdist.serve.http",
}

__all__ = [
    "serve",
    "Replica",
    "Router",
    "Generation",
    "generate",
    "serve_http",
    "HttpServer",
    "BatchedModule",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    return getattr(importlib.import_module(_HOMES[name]), name)
