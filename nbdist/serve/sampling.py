"""Which token comes next: one sampler a request, with a generator of its own (rank)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from nbdist.messages import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nbdist.messages import Sampling

__all__ = ["Sampler", "likeliest", "logprob_of"]


class Sampler:
    """Chooses the tokens of one request; neither other rows nor the global generator matter.

    It computes in float64 on the CPU, so a seed gives the same choice on every device for the
    same logits. One uniform number is drawn for each sampled token.

    Args:
        sampling: how to choose.
        prompt_ids: count for the repetition penalty.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int] = ()) -> None:
        self._sampling = sampling
        self._counts: Counter[int] = Counter()
        self._prompt = set(prompt_ids) if sampling.repetition_penalty != 1.0 else set()
        self._penalised = bool(
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty
            or sampling.frequency_penalty
        )
        self._generator = torch.Generator(device="cpu")
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self._sampling.temperature == 0

    @property
    def plain_greedy(self) -> bool:
        """Whether the largest raw logit decides."""
        return self.greedy and not self._penalised

    def note(self, token: int) -> None:
        """Count a token of the answer, for the penalties."""
        if self._penalised:
            self._counts[token] += 1

    def choose(self, logits: Tensor) -> int:
        """Return the next token for logits of shape (V,)."""
        if self.greedy:
            return int((self._penalise(logits) if self._penalised else logits).argmax())
        return self.draw(self.distribution(logits))

    def distribution(self, logits: Tensor) -> Tensor:
        """Return the probabilities (V,), float64, that `choose` draws from."""
        scores = self._penalise(logits)
        if self.greedy:
            return torch.nn.functional.one_hot(scores.argmax(), len(scores)).double()
        # the maximum goes first: a tiny temperature then gives 0 and -inf, never inf
        scores = (scores - scores.max()) / self._sampling.temperature
        return self._filtered(torch.softmax(scores, dim=-1))

    def draw(self, probabilities: Tensor) -> int:
        """Draw a token from (V,) numbers that need not sum to one."""
        total = probabilities.cumsum(0)
        at = self.uniform() * total[-1]
        # the first place whose sum is above: a token of probability 0 is never taken
        found = int(torch.searchsorted(total, at, right=True))
        return found if found < len(total) else int(probabilities.nonzero()[-1])

    def uniform(self) -> Tensor:
        """Draw a number in [0, 1)."""
        return torch.rand((), dtype=torch.float64, generator=self._generator)

    def _penalise(self, logits: Tensor) -> Tensor:
        scores = logits.to("cpu", torch.float64)
        if not self._penalised:
            return scores
        s = self._sampling
        scores = scores.clone() if scores is logits else scores
        if seen := sorted(self._prompt | set(self._counts)):
            at = torch.tensor(seen)
            old = scores[at]
            rate = s.repetition_penalty
            scores[at] = torch.where(old > 0, old / rate, old * rate)
        if self._counts:
            at = torch.tensor(list(self._counts))
            times = torch.tensor(list(self._counts.values()), dtype=torch.float64)
            scores[at] -= s.presence_penalty + s.frequency_penalty * times
        return scores

    def _filtered(self, probabilities: Tensor) -> Tensor:
        """Keep what top-k, then top-p (arXiv 1904.09751) leave."""
        top_k, top_p = self._sampling.top_k, self._sampling.top_p
        if not 0 < top_k < len(probabilities) and top_p >= 1:
            return probabilities
        ordered, order = probabilities.sort(descending=True, stable=True)
        size = top_k if 0 < top_k < len(ordered) else len(ordered)
        if top_p < 1:
            kept = ordered[:size]
            before = kept.cumsum(0) - kept  # mass of the more likely tokens
            size = max(1, int((before < top_p * kept.sum()).sum()))
        left = torch.zeros_like(probabilities)
        left[order[:size]] = ordered[:size]
        return left / left.sum()


def likeliest(logits: Tensor) -> tuple[list[int], list[bool]]:
    """Return of each row of (K, V) its largest place, and whether its largest number is finite."""
    if not len(logits):
        return [], []
    if logits.device.type == "cpu":
        # numpy's is up to twenty times faster than torch's; it knows no bfloat16
        places = torch.from_numpy(logits.to(torch.float32).numpy().argmax(axis=-1))
        largest = logits.gather(1, places[:, None])[:, 0]
    else:
        largest, places = logits.max(dim=-1)
    return places.tolist(), largest.isfinite().tolist()


def logprob_of(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Return how likely raw logits (V,) make a token, with the `num_top` likeliest beside it."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    best, ids = logprobs.topk(num_top)
    return TokenLogprob(
        token_id=token,
        logprob=float(logprobs[token]),
        top_ids=tuple(ids.tolist()),
        top_logprobs=tuple(best.tolist()),
    )
