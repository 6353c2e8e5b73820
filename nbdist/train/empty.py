"""Models whose weights have no memory until their shards are read from files (ranks)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["empty_weights", "give_memory", "is_empty"]


@contextmanager
def empty_weights() -> Iterator[None]:
    """Let models that are built inside have weights without memory; buffers are as always.

    For a model that no rank can hold whole: build it inside, `parallelize` it, and let
    `load_pretrained` give each rank memory for its own shards and fill them. Not for threads that
    build other models meanwhile.
    """
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        # one that is empty already may be tied: it stays the same object
        if param is not None and not param.is_meta:
            empty = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            module._parameters[name] = empty

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def is_empty(model: nn.Module) -> bool:
    """Return whether all weights of a model are without memory."""
    weights = list(model.parameters())
    return bool(weights) and all(weight.is_meta for weight in weights)


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Give weights without memory as much as this rank's shards need, not initialised.

    Not collective. Weights become new objects, tied ones stay tied: optimizers come after.
    """
    made: dict[int, torch.Tensor] = {}

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_like(tensor, device=device)
        return made[id(tensor)]

    tied = [(m, n, p) for m in model.modules() for n, p in m._parameters.items() if p is not None]
    model._apply(filled)  # type: ignore[no-untyped-call]
    first: dict[int, nn.Parameter] = {}
    for module, name, before in tied:
        weight = module._parameters[name]
        assert weight is not None, "was there before"
        module._parameters[name] = first.setdefault(id(before), weight)
