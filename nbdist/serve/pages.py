"""Keys and values of all rows in blocks, and attention of one packed step over them (rank).

Shapes: T tokens of a step, one row after the other; N rows of a group, Q new tokens of each, S
attended tokens; H heads, H_kv key heads, G = H / H_kv, D head size; P blocks of Z tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor

    from nbdist.serve.sequence import Chunk

__all__ = ["LayerShape", "PackedStep", "Pages"]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores of a token: `num_kv_heads` keys and values of `head_size`."""

    num_kv_heads: int
    head_size: int


class Pages:
    """The memory of a cache: two tensors (H_kv, P, Z, D) a layer.

    A token takes 2 * num_kv_heads * head_size elements in each layer.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.dtype = dtype
        self.token_bytes = dtype.itemsize * sum(2 * s.num_kv_heads * s.head_size for s in layers)
        # zeros: what a mask hides must still be finite, or 0 * nan would show through
        self.keys = [self._zeros(shape) for shape in layers]
        self.values = [self._zeros(shape) for shape in layers]

    def wipe(self, blocks: list[int]) -> None:
        """Set blocks to zero: those of a row whose numbers were not finite."""
        where = torch.tensor(blocks, dtype=torch.long, device=self.device)
        for buffer in (*self.keys, *self.values):
            buffer.index_fill_(1, where, 0.0)

    def _zeros(self, shape: LayerShape) -> Tensor:
        size = (shape.num_kv_heads, self.num_blocks, self.block_size, shape.head_size)
        return torch.zeros(size, dtype=self.dtype, device=self.device)


@dataclass(slots=True)
class _Group:
    """Rows that attend in one call: equally many new tokens, about equally many blocks."""

    chunks: list[Chunk]
    first: int
    num_new: int
    size: int
    fresh: bool
    table: Tensor
    positions: Tensor  # (N, Q)
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores, (N, 1, repeats * Q, S): 0 to attend, else -inf."""
        key = (window, repeats)
        if key not in self.masks:
            places = torch.arange(self.size, device=self.positions.device)
            at = self.positions[:, None, :, None]
            seen = places <= at
            if window is not None:
                seen &= places > at - window
            added = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self.masks[key] = added.masked_fill_(~seen, -torch.inf).repeat(1, 1, repeats, 1)
        return self.masks[key]


class PackedStep:
    """The chunks of one step side by side, without padding; implements `AttentionCache`.

    Args:
        pages: where keys and values go and come from.
        chunks: what to compute; each has its blocks already.

    Attributes:
        chunks: in packed order.
        tokens: (1, T).
        positions: (1, T), place of each token in its row.
        keep: (K,), packed places whose logits are wanted, in the order of `chunks`.
    """

    def __init__(self, pages: Pages, chunks: list[Chunk]) -> None:
        self._pages = pages
        ordered = sorted(chunks, key=_group_key)
        self.chunks = ordered
        device, size = pages.device, pages.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        keep: list[int] = []
        for chunk in ordered:
            tokens += chunk.token_ids
            end = chunk.start + len(chunk.token_ids)
            blocks = chunk.sequence.blocks
            positions += range(chunk.start, end)
            slots += [blocks[p // size] * size + p % size for p in range(chunk.start, end)]
            keep += range(len(tokens) - chunk.num_logits, len(tokens))
        self.tokens = torch.tensor([tokens], device=device)
        self.positions = torch.tensor([positions], device=device)
        self.keep = torch.tensor(keep, dtype=torch.long, device=device)
        self._slots = torch.tensor(slots, device=device)
        self._groups: list[_Group] = []
        first = 0
        for _, members in itertools.groupby(ordered, key=_group_key):
            group = self._group(list(members), first)
            self._groups.append(group)
            first += len(group.chunks) * group.num_new

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
        """Store one layer's new keys and values, and attend to all that a row has.

        Args:
            layer_index: of the attention layer.
            query: (1, H, T, D).
            key: (1, H_kv, T, D), with positions applied.
            value: (1, H_kv, T, D).
            scale: of the scores; 1 / sqrt(D) by default.
            window: a token sees itself and so many less one before it; all when None.

        Returns:
            (1, H, T, D), a view of (1, T, H, D).
        """
        keys, values = self._pages.keys[layer_index], self._pages.values[layer_index]
        keys.flatten(1, 2).index_copy_(1, self._slots, key[0].to(keys.dtype))
        values.flatten(1, 2).index_copy_(1, self._slots, value[0].to(values.dtype))
        parts = []
        for group in self._groups:
            here = slice(group.first, group.first + len(group.chunks) * group.num_new)
            if group.fresh:
                own = (query[:, :, here], key[:, :, here], value[:, :, here])
                mixed = _attend_fresh(group, *own, scale=scale, window=window)
                parts.append(mixed[0].transpose(0, 1))
                continue
            picked = (keys.index_select(1, group.table), values.index_select(1, group.table))
            mixed = _attend_rows(group, query[0, :, here], *picked, scale=scale, window=window)
            parts.append(mixed.flatten(0, 1).flatten(1, 2))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)  # (T, H, D)
        return out[None].transpose(1, 2)

    def _group(self, chunks: list[Chunk], first: int) -> _Group:
        num_new, device = len(chunks[0].token_ids), self._pages.device
        size = max(chunk.start for chunk in chunks) + num_new
        num_blocks = -(-size // self._pages.block_size)
        table: list[int] = []
        for chunk in chunks:
            blocks = chunk.sequence.blocks[:num_blocks]
            table += blocks + blocks[:1] * (num_blocks - len(blocks))
        starts = torch.tensor([chunk.start for chunk in chunks], device=device)
        return _Group(
            chunks=chunks,
            first=first,
            num_new=num_new,
            size=size,
            fresh=_is_fresh(chunks[0]),
            table=torch.tensor(table, device=device),
            positions=starts[:, None] + torch.arange(num_new, device=device),
        )


def _is_fresh(chunk: Chunk) -> bool:
    return chunk.start == 0 and len(chunk.token_ids) > 1


def _group_key(chunk: Chunk) -> tuple[int, int, str]:
    """Rows of one key share a call; a long row must not make short ones as long as itself.

    The order is the same on all ranks that compute a step together.
    """
    if _is_fresh(chunk):
        return (-1, len(chunk.token_ids), chunk.sequence.request_id)
    return (len(chunk.token_ids), (len(chunk.sequence.blocks).bit_length() + 1) // 2, "")


def _attend_fresh(
    group: _Group,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """A prompt's first chunk attends to itself alone: nothing is gathered."""
    mask = None
    if window is not None and group.num_new > window:
        mask = group.mask(window, 1, query.dtype)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_rows(
    group: _Group,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attend with gathered blocks; query is (H, N * Q, D), keys and values (H_kv, blocks, Z, D).

    The G query heads of a key head stand side by side as if they were tokens: keys and values
    are then read once for all of them. Returns (N, Q, H_kv, G, D).
    """
    num_rows, num_new = len(group.chunks), group.num_new
    num_kv, head_size = keys.shape[0], keys.shape[3]
    repeats = query.shape[0] // num_kv
    k, v = (
        p.view(num_kv, num_rows, -1, head_size)[:, :, : group.size].transpose(0, 1)
        for p in (keys, values)
    )  # (N, H_kv, S, D)
    asked = query.reshape(num_kv, repeats, num_rows, num_new, head_size)
    asked = asked.permute(2, 0, 1, 3, 4).reshape(num_rows, num_kv, -1, head_size)
    mixed: Tensor = scaled_dot_product_attention(
        asked, k, v, attn_mask=group.mask(window, repeats, query.dtype), scale=scale
    )  # (N, H_kv, G * Q, D)
    mixed = mixed.reshape(num_rows, num_kv, repeats, num_new, head_size)
    return mixed.permute(0, 3, 1, 2, 4)
