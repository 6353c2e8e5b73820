"""Attention of the decoder, and what a server hands in to remember earlier tokens (ranks).

Shapes: B rows, T new tokens, H heads, D head size, C width of the residual stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from nbdist.train.models.decoder import DecoderConfig

__all__ = ["Attention", "AttentionCache"]


class AttentionCache(Protocol):
    """Keys and values of earlier tokens, kept by whoever serves the model (rank)."""

    def attend(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Add the new tokens' keys and values of one layer; attend to all that a token may see.

        Args:
            layer_index: index in `DecoderLM.layers`.
            query: (B, H, T, D), rotated.
            key: (B, H_kv, T, D), rotated.
            value: (B, H_kv, T, D).

        Returns:
            (B, H, T, D).
        """
        ...


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary positions."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_size = config.head_size
        kv_size = config.num_kv_heads * config.head_size
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.key = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.value = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: AttentionCache | None) -> Tensor:
        """Attend; x is (B, T, C), cos and sin are (B or 1, 1, T, D)."""
        # -1 heads: a tensor-parallel rank holds only some of them
        q = self.query(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (B, H, T, D)
        k = self.key(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (B, H_kv, T, D)
        v = self.value(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if cache is not None:
            attended = cache.attend(self.layer_index, q, k, v)
        else:
            attended = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
        mixed: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return mixed


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
