"""A model's own copy of its weights for serving, whole on every rank (rank)."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nbdist.errors import ServeError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["GivenAway", "resident_copy"]

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
    bare = _unwrapped(model)
    config = getattr(bare, "config", None)
    if config is None:
        raise ServeError(
            f"`serve` was given a {type(bare).__name__}, which has no `config` to build a copy "
            "from; pass a DecoderLM, or a module with the same `config` and `forward`"
        )
    # FSDP2 puts a subclass of its own in front of the model's class
    cls: Any = next(c for c in type(bare).__mro__ if not issubclass(c, FSDPModule))
    with torch.device("meta"):  # no memory, and no random numbers for weights that are replaced
        copy = cls(deepcopy(config))  # its own: serving sets a model's attention there
    weights = _full_weights(bare)
    try:
        copy.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:
        raise ServeError(
            f"the weights of {cls.__name__} do not fit a copy built from its config: {error}; "
            "serve the whole model, not a stage or an edited one"
        ) from error
    _complete(copy, weights)
    if any(tensor.is_cuda for tensor in weights.values()):
        torch.cuda.synchronize()  # another thread, on another stream, reads the copy
    return cast("nn.Module", copy.eval().requires_grad_(requires_grad=False))


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


def _unwrapped(model: nn.Module) -> nn.Module:
    for name in ("_orig_mod", "module"):  # torch.compile, DistributedDataParallel
        if isinstance(inner := getattr(model, name, None), torch.nn.Module):
            return _unwrapped(inner)
    return model


@torch.no_grad()
def _full_weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, whole; tensors that are one in the model stay one."""
    # keep_vars gives the tensors themselves, and runs FSDP2's hook that puts shards in place
    named = {**dict(model.named_buffers()), **model.state_dict(keep_vars=True)}
    made: dict[int, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, tensor in named.items():
        bare_name = name
        for wrapper in _WRAPPERS:
            bare_name = bare_name.replace(wrapper, "")
        if id(tensor) not in made:
            made[id(tensor)] = _owned(tensor)
        weights[bare_name] = made[id(tensor)]
    return weights


def _owned(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()
