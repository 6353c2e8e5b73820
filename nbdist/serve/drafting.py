"""A small model that guesses for a large one, all rows at a time (rank)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.serve.adapt import adapted
from nbdist.serve.blocks import BlockPool
from nbdist.serve.runner import Runner
from nbdist.serve.sequence import Chunk, Sequence

if TYPE_CHECKING:
    from torch import nn

__all__ = ["DraftModelProposer"]


class DraftModelProposer:
    """Guesses the most likely tokens of a draft model, over a cache of its own.

    A row whose tokens do not fit into that cache or its context gets no guesses.

    Args:
        model: with the vocabulary of the large one; in eval mode.
        cache_tokens: most tokens that its cache holds.
        block_size: tokens of a cache block.
    """

    def __init__(self, model: nn.Module, *, cache_tokens: int, block_size: int = 16) -> None:
        self._face = adapted(model)
        num_blocks = -(-cache_tokens // block_size)
        self._pool = BlockPool(num_blocks, block_size, share_prefixes=False)
        self._runner = Runner(self._face, num_blocks=num_blocks, block_size=block_size)
        self._shadows: dict[str, Sequence] = {}

    def propose(self, rows: list[Sequence], sizes: list[int]) -> list[list[int]]:
        """See `Proposer.propose`."""
        wanted: dict[str, int] = {}
        made: dict[str, list[int]] = {row.request_id: [] for row in rows}
        for row, size in zip(rows, sizes, strict=True):
            if self._follow(row, size):
                wanted[row.request_id] = size
        while wanted:
            chunks = [self._next(self._shadows[name]) for name in wanted]
            computed = self._runner.forward(chunks)
            for name in computed.failed:
                del wanted[name]
            if computed.logits is None:
                break
            likely = computed.logits.argmax(dim=-1).tolist()
            for chunk, token in zip(computed.chunks, likely, strict=True):
                shadow, name = chunk.sequence, chunk.sequence.request_id
                shadow.num_computed = chunk.start + len(chunk.token_ids)
                shadow.token_ids.append(token)
                made[name].append(token)
                if len(made[name]) == wanted[name]:
                    del wanted[name]
        return [made[row.request_id] for row in rows]

    def forget(self, request_id: str) -> None:
        """See `Proposer.forget`."""
        shadow = self._shadows.pop(request_id, None)
        if shadow is not None:
            self._pool.release(shadow.blocks)

    def _follow(self, row: Sequence, size: int) -> bool:
        """Bring a row's shadow up to its tokens, with room for the guesses."""
        shadow = self._shadows.get(row.request_id)
        if shadow is None:
            shadow = self._shadows[row.request_id] = Sequence(row.request, [])
        # what was guessed and held is computed already; its last token never is
        shadow.num_computed = min(shadow.num_computed, len(row.token_ids) - 1)
        shadow.token_ids = list(row.token_ids)
        most = len(row.token_ids) + size
        if most > self._face.context_length:
            return False
        blocks = self._pool.allocate(max(0, self._pool.blocks_for(most) - len(shadow.blocks)))
        shadow.blocks += blocks or []
        return blocks is not None

    def _next(self, shadow: Sequence) -> Chunk:
        return Chunk(shadow, shadow.num_computed, shadow.token_ids[shadow.num_computed :], 1)
