"""The forward pass of Llama's family in few calls, over transformers' own modules (rank).

For a step of few tokens on a CPU, a third of the time of transformers' forward is the calling of
modules and small operations. This is the same arithmetic on the same weights, read anew in each
step, without what serving does not need; `HuggingFaceModel` takes it where it gives the logits of
the model's own forward, and runs the model as it is elsewhere.

Shapes: T tokens, C width, H heads, H_kv key heads, D head size, V vocabulary.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nbdist.train.models.decoder import AttentionCache

__all__ = ["LeanForward", "lean_forward"]

_log = logging.getLogger(__name__)

_FAMILY = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
}
# From so many rows on a CPU's product is faster with the weight first: (O, I) by (I, T). In fp32
# by a fifth at 12 to 64 rows of a small model; in bf16 by a third for all sizes that were tried.
_ROWS_FOR_WEIGHT_FIRST = {torch.float32: 12, torch.bfloat16: 2}
_PROBE_TOKENS = 12
# of the largest logit; another order of sums, and in 16 bits another place of rounding
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_16_BITS = 0.1


def lean_forward(model: Any, options: list[dict[str, Any]]) -> LeanForward | None:
    """Return a lean forward of `model`; None when it has another shape or gives other logits.

    Args:
        model: of transformers, in eval mode, with its own attention.
        options: of `AttentionCache.attend`, layer by layer, as transformers gives them.
    """
    if type(model).__name__ not in _FAMILY or not _is_plain(model):
        return None
    positions = torch.arange(_PROBE_TOKENS, device=model.model.embed_tokens.weight.device)[None]
    tokens = positions * 7 % model.config.vocab_size
    with torch.inference_mode():
        wanted: Tensor = model(input_ids=tokens, use_cache=False).logits[0]
        try:
            lean = LeanForward(model, options)
            made = lean(tokens, positions, _Causal(), positions[0])
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            _log.warning("%s has not the shape of a Llama: %s", type(model).__name__, error)
            return None
    furthest = float((made - wanted).abs().max())
    most = _TOLERANCE.get(wanted.dtype, _TOLERANCE_16_BITS) * float(wanted.abs().max())
    if furthest <= most or not wanted.isfinite().all():
        return lean
    _log.warning("%s has logits of its own: %s off", type(model).__name__, furthest)
    return None


class LeanForward:
    """The forward pass of a model of the family.

    Args:
        model: of transformers, in eval mode; its weights stay its own.
        options: see `lean_forward`.
    """

    def __init__(self, model: Any, options: list[dict[str, Any]]) -> None:
        self._embedding = model.model.embed_tokens
        pairs = zip(model.model.layers, options, strict=True)
        self._layers = [_Layer(layer, own) for layer, own in pairs]
        self._norm = model.model.norm
        self._rotary = model.model.rotary_emb
        self._head = model.lm_head

    def __call__(
        self, tokens: Tensor, positions: Tensor, step: AttentionCache, keep: Tensor
    ) -> Tensor:
        """Return the logits (K, V) at the places `keep` (K,) of tokens and positions (1, T)."""
        x = functional.embedding(tokens[0], self._embedding.weight)  # (T, C)
        cos, sin = self._rotary(x, positions)  # (1, T, D)
        left, right = sin.chunk(2, dim=-1)
        # the rotation's sign goes to the sine: one operation less in each layer
        turn = (cos.transpose(0, 1), torch.cat((-left, right), dim=-1).transpose(0, 1))
        for layer in self._layers:
            x = layer(x, turn, step)
        logits: Tensor = _linear(self._head, _norm(self._norm, x[keep]))
        return logits


class _Layer:
    """One decoder layer: pre-norm attention, then pre-norm SwiGLU."""

    def __init__(self, layer: Any, options: dict[str, Any]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self._query, self._key, self._value = attention.q_proj, attention.k_proj, attention.v_proj
        self._output = attention.o_proj
        self._head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self._gate, self._up, self._down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self._act = mlp.act_fn
        self._index: int = attention.layer_idx
        self._head_size: int = attention.head_dim
        self._options = options

    def __call__(self, x: Tensor, turn: tuple[Tensor, Tensor], step: Any) -> Tensor:
        """Map (T, C) to (T, C)."""
        normed = _norm(self._norms[0], x)
        query = self._heads(self._query, normed, self._head_norms[0])
        key = self._heads(self._key, normed, self._head_norms[1])
        value = self._heads(self._value, normed)
        # side by side, so that each is dense in its last dimension
        packed = torch.cat((query, key, value), dim=1)
        num_turned = query.shape[1] + key.shape[1]
        turned = _rotate(packed[:, :num_turned], *turn).transpose(0, 1)[None]
        num_heads = query.shape[1]
        mixed = step.attend(
            self._index,
            turned[:, :num_heads],
            turned[:, num_heads:],
            packed[:, num_turned:].transpose(0, 1)[None],
            **self._options,
        )  # (1, H, T, D)
        x = x + _linear(self._output, mixed[0].transpose(0, 1).flatten(1))
        normed = _norm(self._norms[1], x)
        wide = self._act(_linear(self._gate, normed)) * _linear(self._up, normed)
        return x + _linear(self._down, wide)

    def _heads(self, linear: nn.Module, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        heads = _linear(linear, x).view(len(x), -1, self._head_size)  # (T, H, D)
        return heads if norm is None else _norm(norm, heads)


class _Causal:
    """Attends to the tokens at hand alone; implements `AttentionCache`."""

    def attend(
        self,
        layer_index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        size = query.shape[2]
        mask = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
        if window is not None:
            mask = mask.triu(1 - window)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (T, H, D) by angles (T, 1, D) (arXiv 2104.09864)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _norm(norm: Any, x: Tensor) -> Tensor:
    return functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _linear(linear: Any, x: Tensor) -> Tensor:
    """Map (T, I) to (T, O)."""
    least = _ROWS_FOR_WEIGHT_FIRST.get(x.dtype) if x.device.type == "cpu" else None
    is_plain = type(linear) is torch.nn.Linear  # else with rounded weights
    if not is_plain or least is None or len(x) < least:
        mapped: Tensor = linear(x)
    elif linear.bias is None:
        mapped = torch.mm(linear.weight, x.t()).t()
    else:
        mapped = torch.addmm(linear.bias[:, None], linear.weight, x.t()).t()
    return mapped


def _is_plain(model: nn.Module) -> bool:
    """Whether nothing is put on its modules from outside, such as shards and hooks."""
    return not any(isinstance(weight, DTensor) for weight in model.parameters()) and not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )
