"""A model's own copy of its weights for serving, whole on every rank (rank)."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nbdist.errors import ServeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

__all__ = [
    "GivenAway",
    "bare_model",
    "empty_model",
    "fill",
    "named_weights",
    "resident_copy",
    "shared_view",
]

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


class GivenAway(torch.nn.Module):
    """Around a model that nobody else uses: it is served itself, not a copy of it.

    Args:
        module: whole, on the device that serves it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def resident_copy(model: nn.Module) -> nn.Module:
    """Return an unsharded eval copy of `model` that shares no memory with it.

    Collective over: the axes that shard the model. Sharded weights are gathered one tensor at a
    time, so at its end each rank holds the whole model once more beside its shards. The global
    random generators are not touched.

    Args:
        model: built by `type(model)(model.config)`; FSDP2, tensor parallelism, DDP, activation
            checkpointing and compilation may be around or on it. One that is `GivenAway` is
            returned itself.

    Raises:
        ServeError: a copy cannot be built from the model's config and weights.
    """
    if isinstance(model, GivenAway):
        return model.module.eval().requires_grad_(requires_grad=False)
    bare = bare_model(model)
    return fill(empty_model(bare), _once(named_weights(bare), _owned))


def shared_view(model: nn.Module) -> nn.Module:
    """Return an eval model of its own that is made of the very weights of `model`.

    Hooks, training mode and attention of `model` are not touched, and later updates show at once.

    Args:
        model: whole on this rank; otherwise as in `resident_copy`.

    Raises:
        ServeError: a view cannot be built from the model's config and weights.
    """
    bare = bare_model(model)
    return fill(empty_model(bare), _once(named_weights(bare), torch.Tensor.detach))


def empty_model(bare: nn.Module) -> nn.Module:
    """Return another model of that class and config, without memory.

    Raises:
        ServeError: the model has no config.
    """
    config = getattr(bare, "config", None)
    if config is None:
        raise ServeError(
            f"`serve` was given a {type(bare).__name__}, which has no `config` to build a copy "
            "from; pass a DecoderLM, or a module with the same `config` and `forward`"
        )
    # FSDP2 puts a subclass of its own in front of the model's class
    cls: Any = next(c for c in type(bare).__mro__ if not issubclass(c, FSDPModule))
    with torch.device("meta"):  # no memory, and no random numbers for weights that are replaced
        return cast("nn.Module", cls(deepcopy(config)))  # its own: serving sets attention there


def fill(empty: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """Give a model its weights, without a copy, and make it ready for serving.

    Raises:
        ServeError: they do not fit it.
    """
    try:
        empty.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:
        raise ServeError(
            f"the weights of {type(empty).__name__} do not fit a copy built from its config: "
            f"{error}; serve the whole model, not a stage or an edited one"
        ) from error
    _complete(empty, weights)
    if any(tensor.is_cuda for tensor in weights.values()):
        torch.cuda.synchronize()  # another thread, on another stream, reads the copy
    return empty.eval().requires_grad_(requires_grad=False)


def _complete(copy: nn.Module, weights: dict[str, Tensor]) -> None:
    """Set the buffers that a state dict leaves out, and see that nothing is unset."""
    for name, buffer in list(copy.named_buffers()):
        if buffer.is_meta and name in weights:  # not persistent: a state dict leaves it out
            parent, _, leaf = name.rpartition(".")
            setattr(copy.get_submodule(parent), leaf, weights[name])
    unset = [n for n, t in (*copy.named_parameters(), *copy.named_buffers()) if t.is_meta]
    if unset:
        raise ServeError(
            f"{type(copy).__name__} was copied for serving, but it has no weights for {unset[:8]}; "
            "serve the whole model, not a stage of it"
        )


def bare_model(model: nn.Module) -> nn.Module:
    """Return the user's own module, without compilation and DDP around it."""
    for name in ("_orig_mod", "module"):  # torch.compile, DistributedDataParallel
        if isinstance(inner := getattr(model, name, None), torch.nn.Module):
            return bare_model(inner)
    return model


def named_weights(bare: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers as they are, by their names in a bare model."""
    # keep_vars gives the tensors themselves, and runs FSDP2's hook that puts shards in place
    named = {**dict(bare.named_buffers()), **bare.state_dict(keep_vars=True)}
    return [(_bare_name(name), tensor) for name, tensor in named.items()]


def _bare_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _once(named: list[tuple[str, Tensor]], take: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Take each tensor; those that are one in the model stay one."""
    made: dict[int, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, tensor in named:
        if id(tensor) not in made:
            made[id(tensor)] = take(tensor)
        weights[name] = made[id(tensor)]
    return weights


@torch.no_grad()
def _owned(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()
