"""Keys and values of the running rows, one contiguous slot each (rank).

Shapes: N rows, B rows of one forward, T new tokens, S attended tokens, H_kv key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CacheShape", "SlotCache"]

_GROWTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Size and place of a cache.

    A slot of n tokens takes 2 * num_layers * num_kv_heads * head_size * n elements.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    max_batch: int
    context_length: int
    dtype: torch.dtype
    device: torch.device


class SlotCache:
    """Slots 0 ... N-1 hold the running rows without gaps; implements the model's `AttentionCache`.

    Memory follows the longest running row: it grows in powers of two up to the context, and is
    given back when the last row leaves.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.lengths: list[int] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._slots = slice(0, 0)
        self._positions = torch.empty(0, 0, dtype=torch.long)
        self._mask = torch.empty(0, dtype=torch.bool)

    @property
    def capacity(self) -> int:
        """Tokens that fit into a slot at present."""
        return self._keys[0].shape[2] if self._keys else 0

    def append(self, lengths: list[int]) -> Tensor:
        """Open slots for new rows and aim the next forward at them.

        Args:
            lengths: prompt tokens of each new row.

        Returns:
            positions (B, T) of the right-padded prompts, T = max(lengths).
        """
        first = len(self.lengths)
        self.lengths.extend(lengths)
        positions = torch.arange(max(lengths), device=self.shape.device)
        return self._aim(slice(first, len(self.lengths)), positions.expand(len(lengths), -1))

    def advance(self) -> Tensor:
        """Aim the next forward at one more token of every row; return its positions (N, 1)."""
        positions = torch.tensor(self.lengths, device=self.shape.device)[:, None]
        self.lengths = [length + 1 for length in self.lengths]
        return self._aim(slice(0, len(self.lengths)), positions)

    def drop(self, slot: int) -> None:
        """Free a slot; the last row moves into it."""
        last = len(self.lengths) - 1
        if slot != last:
            used = self.lengths[last]
            for buffer in (*self._keys, *self._values):
                buffer[slot, :, :used] = buffer[last, :, :used]
            self.lengths[slot] = self.lengths[last]
        self.lengths.pop()
        if not self.lengths:
            self.clear()

    def clear(self) -> None:
        """Forget all rows and give the memory back."""
        self.lengths.clear()
        self._keys.clear()
        self._values.clear()

    def update(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store one layer's new keys and values (B, H_kv, T, D); see `AttentionCache.update`."""
        rows = torch.arange(self._slots.start, self._slots.stop, device=key.device)[:, None]
        keys, values = self._keys[layer_index], self._values[layer_index]
        keys[rows, :, self._positions] = key.transpose(1, 2).to(keys.dtype)
        values[rows, :, self._positions] = value.transpose(1, 2).to(values.dtype)
        size = self._mask.shape[-1]
        return keys[self._slots, :, :size], values[self._slots, :, :size], self._mask

    def _aim(self, slots: slice, positions: Tensor) -> Tensor:
        size = max(self.lengths[slots])
        self._reserve(size)
        self._slots, self._positions = slots, positions
        # A padded place writes beyond its row's length; no real query sees it, and the row's own
        # later token overwrites it before it comes into view.
        places = torch.arange(size, device=self.shape.device)
        self._mask = places <= positions[:, None, :, None]  # (B, 1, T, S)
        return positions

    def _reserve(self, size: int) -> None:
        old = self.capacity
        if size <= old:
            return
        shape = self.shape
        wanted = -(-size // _GROWTH) * _GROWTH
        capacity = min(shape.context_length, max(2 * old, wanted))
        for buffers in (self._keys, self._values):
            # zeros: what the mask hides must still be finite, or 0 * nan would show through
            grown = [
                torch.zeros(
                    (shape.max_batch, shape.num_kv_heads, capacity, shape.head_size),
                    dtype=shape.dtype,
                    device=shape.device,
                )
                for _ in range(shape.num_layers)
            ]
            for new, kept in zip(grown, buffers, strict=bool(buffers)):
                new[:, :, :old] = kept
            buffers[:] = grown
