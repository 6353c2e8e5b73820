"""Which token comes next: one sampler a request, with a generator of its own (rank)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from nbdist.messages import Sampling

__all__ = ["Sampler"]


class Sampler:
    """Chooses the tokens of one request; neither other rows nor the global generator matter.

    It computes in float64 on the CPU, so a seed gives the same choice on every device for the
    same logits.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator(device="cpu")
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self._sampling.temperature == 0

    def choose(self, logits: Tensor) -> int:
        """Return the next token for logits of shape (V,)."""
        if self.greedy:
            return int(logits.argmax())
        scores = logits.to("cpu", torch.float64)
        # the maximum goes first: a tiny temperature then gives 0 and -inf, never inf
        scores = (scores - scores.max()) / self._sampling.temperature
        order = scores.argsort(descending=True, stable=True)
        probabilities = torch.softmax(scores[order], dim=-1)
        keep = self._num_kept(probabilities)
        drawn = torch.multinomial(probabilities[:keep], 1, generator=self._generator)
        return int(order[drawn])

    def _num_kept(self, probabilities: Tensor) -> int:
        """How many of the sorted tokens top-k, then top-p (arXiv 1904.09751) leave."""
        size = len(probabilities)
        if 0 < self._sampling.top_k < size:
            size = self._sampling.top_k
        if self._sampling.top_p < 1:
            kept = probabilities[:size]
            before = kept.cumsum(0) - kept  # mass of the more likely tokens
            size = max(1, int((before < self._sampling.top_p * kept.sum()).sum()))
        return size
