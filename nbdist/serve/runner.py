"""The forward pass of a step: chunks in, logits out, over the paged cache (rank)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from nbdist.serve.pages import PackedStep, Pages

if TYPE_CHECKING:
    from torch import Tensor

    from nbdist.serve.adapt import ServedModel
    from nbdist.serve.sequence import Chunk

__all__ = ["Computed", "Runner"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Computed:
    """What a step has computed.

    Attributes:
        chunks: that went well.
        logits: (K, V), those of the chunks one after the other; None without chunks.
        failed: what was raised for the others, by request id.
    """

    chunks: list[Chunk] = field(default_factory=list)
    logits: Tensor | None = None
    failed: dict[str, Exception] = field(default_factory=dict)


class Runner:
    """Runs a model over a cache of its own.

    Args:
        model: adapted; on one device, in eval mode.
        num_blocks: of the cache.
        block_size: tokens of a block.
    """

    def __init__(self, model: ServedModel, *, num_blocks: int, block_size: int) -> None:
        self._model = model
        self.pages = Pages(
            model.layers,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.dtype,
            device=model.device,
        )

    @torch.inference_mode()
    def forward(self, chunks: list[Chunk]) -> Computed:
        """Compute chunks together; when that raises, each alone, so that the others go on."""
        try:
            step = PackedStep(self.pages, chunks)
            logits = self._model.forward(step.tokens, step.positions, step, step.keep)
            return Computed(step.chunks, logits)
        except Exception as error:  # noqa: BLE001 - becomes the rows' ending
            if len(chunks) == 1:
                return Computed(failed={chunks[0].sequence.request_id: error})
            _log.exception("a step of %d rows failed; each is tried alone", len(chunks))
        alone = [self.forward([chunk]) for chunk in chunks]
        logits_of = [one.logits for one in alone if one.logits is not None]
        return Computed(
            [chunk for one in alone for chunk in one.chunks],
            torch.cat(logits_of) if logits_of else None,
            {name: error for one in alone for name, error in one.failed.items()},
        )

    @torch.inference_mode()
    def wipe(self, blocks: list[int]) -> None:
        """Make blocks harmless whose numbers are not finite."""
        self.pages.wipe(blocks)
