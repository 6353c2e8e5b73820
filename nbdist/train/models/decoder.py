"""A small decoder language model: RMSNorm, RoPE, grouped-query attention, SwiGLU (ranks).

It knows nothing of meshes, trainers or serving: sharding is put on from outside, and a server
hands in its own `AttentionCache`. Shapes: B rows, T new tokens, S attended tokens, H heads,
D head size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from nbdist.train.models.moe import MixtureOfExperts

__all__ = ["AttentionCache", "DecoderConfig", "DecoderLM"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Size of a `DecoderLM`.

    Attributes:
        vocab_size: number of token ids.
        num_layers: number of blocks.
        num_heads: query heads; divides `hidden_size` into even head sizes.
        num_kv_heads: key and value heads; divides `num_heads`.
        hidden_size: width of the residual stream.
        context_length: most tokens a row may have.
        ffn_multiple: hidden width of the feed-forward part over `hidden_size`; rounded up to 16.
        tie_embeddings: use the embedding as output projection.
        rope_theta: base of the rotary angles (RoFormer, arXiv 2104.09864).
        norm_eps: added to the mean square in RMSNorm.
        num_experts: experts of each feed-forward part; 0 for a dense one.
        experts_per_token: of `MixtureOfExperts`, as are the two below.
        capacity_factor: None drops nothing.
        balance_weight: of the load-balance loss.
    """

    vocab_size: int
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    hidden_size: int = 128
    context_length: int = 128
    ffn_multiple: float = 8 / 3
    tie_embeddings: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    num_experts: int = 0
    experts_per_token: int = 2
    capacity_factor: float | None = None
    balance_weight: float = 0.01

    def __post_init__(self) -> None:
        names = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "hidden_size")
        for name in (*names, "context_length", "ffn_multiple", "rope_theta", "norm_eps"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} is not above 0; set {name} > 0")
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} is no multiple of 2 * num_heads="
                f"{2 * self.num_heads}: rotary heads need an even size; set hidden_size="
                f"{math.ceil(self.hidden_size / (2 * self.num_heads)) * 2 * self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}; "
                f"set num_kv_heads to a divisor of {self.num_heads}"
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def ffn_size(self) -> int:
        """Hidden width of the feed-forward part."""
        return math.ceil(self.hidden_size * self.ffn_multiple / 16) * 16

    @classmethod
    def tiny(cls, vocab_size: int = 1024, *, context_length: int = 128) -> DecoderConfig:
        """Return a size that learns in seconds on a laptop core: 0.9 M parameters at 1024."""
        return cls(vocab_size=vocab_size, context_length=context_length)

    @classmethod
    def small(cls, vocab_size: int = 4096, *, context_length: int = 256) -> DecoderConfig:
        """Return a size for one GPU or a patient CPU: 11 M parameters at 4096."""
        return cls(
            vocab_size=vocab_size,
            num_layers=6,
            num_heads=6,
            num_kv_heads=3,
            hidden_size=384,
            context_length=context_length,
        )


class AttentionCache(Protocol):
    """Keys and values of earlier tokens, kept by whoever serves the model (rank)."""

    def update(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add the new tokens' keys and values of one layer; return all that may be attended to.

        Args:
            layer_index: index in `DecoderLM.layers`.
            key: (B, H_kv, T, D), rotated.
            value: (B, H_kv, T, D).

        Returns:
            key (B, H_kv, S, D), value (B, H_kv, S, D) and mask (B, 1, T, S), bool, True = attend.
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
        mask = None
        if cache is not None:
            k, v, mask = cache.update(self.layer_index, k, v)
        attended = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=cache is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        mixed: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.down = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        mapped: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return mapped


class Block(nn.Module):
    """One layer: pre-norm attention, then pre-norm feed-forward."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config, layer_index)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.ffn = FeedForward(config) if config.num_experts == 0 else _experts(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: AttentionCache | None) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        x = x + self.attention(self.attention_norm(x), cos, sin, cache)
        ended: Tensor = x + self.ffn(self.ffn_norm(x))
        return ended


def _experts(config: DecoderConfig) -> MixtureOfExperts:
    return MixtureOfExperts(
        config.hidden_size,
        config.ffn_size,
        config.num_experts,
        experts_per_token=config.experts_per_token,
        capacity_factor=config.capacity_factor,
        balance_weight=config.balance_weight,
    )


class DecoderLM(nn.Module):
    """A decoder language model; every rank may build it, nothing in it is collective.

    Args:
        config: its size; kept as `model.config`.
        seed: of the initial weights; the same on every device type.
    """

    def __init__(self, config: DecoderConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        # a tied head is the embedding itself, so the parameter has one name and one shard
        self.head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.reset_parameters(seed)

    @property
    def num_parameters(self) -> int:
        """Number of weights of the whole model, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def reset_parameters(self, seed: int | torch.Generator = 0) -> None:
        """Draw fresh weights: a function of the seed alone, whatever the device.

        Needed after `to_empty` of a model that was built on the meta device; a meta model is left
        as it is. Residual outputs start smaller with depth (GPT-2 report, section 2.3).
        """
        if self.embedding.weight.is_meta:
            return
        generator = (
            seed
            if isinstance(seed, torch.Generator)
            else torch.Generator(device="cpu").manual_seed(seed)
        )
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                    continue
                std = (
                    residual_std
                    if name.endswith(("output.weight", "down.weight", ".down"))
                    else 0.02
                )
                drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                parameter.copy_(drawn.normal_(0.0, std, generator=generator))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """Return the logits of the next token after each token.

        Args:
            tokens: (B, T), long.
            positions: (B, T), long, place of each token in its row; 0 ... T-1 when None.
            cache: attend to what it returns; without one, plain causal attention.

        Returns:
            (B, T, V).

        Raises:
            ValueError: more tokens than `context_length`, or a cache without positions.
        """
        if tokens.shape[1] > self.config.context_length:
            raise ValueError(
                f"tokens have shape {tuple(tokens.shape)}, but context_length="
                f"{self.config.context_length}; pass at most that many tokens a row"
            )
        if positions is None:
            if cache is not None:
                raise ValueError(
                    "`cache` was given without `positions`: the place of the new tokens is "
                    "unknown; pass positions of shape (B, T)"
                )
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x: Tensor = self.embedding(tokens)
        cos, sin = self._rotary(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, cache)
        x = self.norm(x)
        return functional.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # made on the fly: no buffer that `to_empty` would leave unset
        exact = torch.float64 if dtype is torch.float64 else torch.float32
        size = self.config.head_size
        powers = torch.arange(0, size, 2, dtype=exact, device=positions.device) / size
        angles = positions[:, None, :, None].to(exact) * self.config.rope_theta**-powers
        angles = torch.cat((angles, angles), dim=-1)  # (B or 1, 1, T, D)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
