"""The forward passes of a replica: prefill of joining rows, one decode step for all (rank)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nbdist.serve.cache import CacheShape, SlotCache

if TYPE_CHECKING:
    from torch import Tensor

    from nbdist.train.models.decoder import DecoderLM

__all__ = ["Runner"]


class Runner:
    """Runs a resident model over slots; slot i is the i-th row, in the scheduler's order.

    Args:
        model: on one device, in eval mode; nothing else may write to it.
        max_batch: number of slots.
    """

    def __init__(self, model: DecoderLM, *, max_batch: int) -> None:
        config = model.config
        weight = next(model.parameters())
        self._model = model
        self._device = weight.device
        self.cache = SlotCache(
            CacheShape(
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_size=config.hidden_size // config.num_heads,
                max_batch=max_batch,
                context_length=config.context_length,
                dtype=weight.dtype,
                device=weight.device,
            )
        )

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]]) -> Tensor:
        """Open a slot for each prompt; return the logits (B, V) after its last token.

        When it raises, the slots that it opened are closed again.
        """
        before = len(self.cache.lengths)
        try:
            return self._prefill(prompts)
        except BaseException:
            del self.cache.lengths[before:]
            raise

    def _prefill(self, prompts: list[list[int]]) -> Tensor:
        lengths = [len(prompt) for prompt in prompts]
        positions = self.cache.append(lengths)
        tokens = torch.zeros(positions.shape, dtype=torch.long)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        logits: Tensor = self._model(tokens.to(self._device), positions, self.cache)
        last = torch.tensor(lengths, device=self._device) - 1
        return logits[torch.arange(len(prompts), device=self._device), last]

    @torch.inference_mode()
    def decode(self, tokens: list[int]) -> Tensor:
        """Feed one token to every row, slot 0 first; return the next logits (N, V)."""
        positions = self.cache.advance()
        fed = torch.tensor(tokens, device=self._device)[:, None]
        logits: Tensor = self._model(fed, positions, self.cache)
        return logits[:, -1]

    @torch.inference_mode()
    def drop(self, slot: int) -> None:
        """Free a slot; the last row moves into it."""
        self.cache.drop(slot)

    def clear(self) -> None:
        """Free all slots."""
        self.cache.clear()
