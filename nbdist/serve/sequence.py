"""A request inside an engine: its tokens, its blocks, its progress (torch-free, anywhere)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.serve.engine import EngineRequest

__all__ = ["Chunk", "Sequence"]


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way.

    Attributes:
        request: what was asked.
        token_ids: the prompt, then what was generated.
        num_computed: tokens whose keys and values lie in `blocks`.
        blocks: cache blocks, in the order of the tokens.
        draft: tokens guessed to come next; checked in the next step.
        digest: of the last published block.
        num_published: full blocks that others can find.
        num_preempted: how often its blocks were taken away.
        version: of the weights that computed its blocks.
        first_version: of the weights that it began with.
    """

    request: EngineRequest
    token_ids: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    digest: bytes = b""
    num_published: int = 0
    num_preempted: int = 0
    version: int = 0
    first_version: int = 0

    @property
    def request_id(self) -> str:
        """Name of the request."""
        return self.request.request_id

    @property
    def num_generated(self) -> int:
        """Tokens that were made so far."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_pending(self) -> int:
        """Known tokens that are still to be computed; one in a row that only decodes."""
        return len(self.token_ids) - self.num_computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step computes of a sequence: its next pending tokens, then its draft.

    Attributes:
        sequence: whose tokens.
        start: place of the first token.
        token_ids: tokens to compute.
        num_logits: how many of the last places have logits that are wanted; 0 in the middle of a
            prompt.
    """

    sequence: Sequence
    start: int
    token_ids: list[int]
    num_logits: int
