"""Context parallelism: each rank of `cp` holds a part of every row's tokens (ranks)."""

from __future__ import annotations

import math
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from nbdist.train.mesh import Axis, axis_rank, axis_size
from nbdist.train.models import DecoderLM
from nbdist.train.parallelize.record import applied_to
from nbdist.train.parallelize.ring import ring_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["check_context", "own_tokens", "spread_context"]


def check_context(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a model whose rows cannot be cut over `cp`; touches nothing.

    Raises:
        ValueError: it is no DecoderLM, or the mesh has `pp` too.
    """
    cp, pp = axis_size(mesh, Axis.CP), axis_size(mesh, Axis.PP)
    if cp > 1 and (pp > 1 or not isinstance(model, DecoderLM)):
        raise ValueError(
            f"cp={cp} was asked for {type(model).__name__} with pp={pp}: where its tokens get "
            "their positions is known for a DecoderLM that one rank can run; set cp=1, or pp=1 "
            "and a DecoderLM"
        )


def spread_context(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let a decoder compute its rank's tokens of each row, in place.

    Its input stays the whole row on every rank; its output is of `own_tokens` only.
    """
    if axis_size(mesh, Axis.CP) == 1:
        return
    assert isinstance(model, DecoderLM), "checked before"
    mode = _RingMode(mesh[Axis.CP].get_group())

    def cut(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tokens = args[0] if args else kwargs["tokens"]
        if len(args) > 1 or kwargs.keys() - {"tokens"}:
            raise ValueError(
                "a model spread over cp was called with positions or a cache; its rows are cut "
                "by token, so call it with tokens alone"
            )
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return (_cut(tokens, mesh), _cut(places, mesh)), {}

    model.register_forward_pre_hook(cut, with_kwargs=True)
    for layer in model.layers:  # around the layer: it may be computed again in backward
        layer.forward = _within(mode, layer.forward)


def own_tokens(model: nn.Module, tensor: Tensor) -> Tensor:
    """Return the part of (B, T, ...) that belongs to this rank's output of a model."""
    applied = applied_to(model)
    if applied is None or axis_size(applied.mesh, Axis.CP) == 1:
        return tensor
    return _cut(tensor, applied.mesh)


def _cut(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    cp = axis_size(mesh, Axis.CP)
    if tensor.shape[1] % cp:
        raise ValueError(
            f"rows of {tensor.shape[1]} tokens cannot be cut evenly over cp={cp} ranks; pass rows "
            f"of {math.ceil(tensor.shape[1] / cp) * cp} tokens, or set cp to a divisor"
        )
    return tensor.chunk(cp, dim=1)[axis_rank(mesh, Axis.CP)]


def _within(mode: _RingMode, forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def within(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return within


class _RingMode(TorchFunctionMode):
    """Lets `scaled_dot_product_attention` see the tokens of all ranks of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None or dropout_p:
            raise ValueError(
                "attention over cp was called with a mask or dropout, which the ring does not "
                "know; use is_causal and dropout_p=0"
            )
        if enable_gqa:
            times = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(times, dim=1) for t in (key, value))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return ring_attention(query, key, value, self._group, is_causal=is_causal, scale=scale)
