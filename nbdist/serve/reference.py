"""The `reference` engine: the plainest way to the same tokens, and the baseline (rank).

Nothing is cached and nothing is shared between requests unless transformers' own `generate` does
it, so what the other engines make is compared with this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nbdist.messages import EngineStats
from nbdist.serve.adapt import HuggingFaceModel, adapted
from nbdist.serve.engine import EngineLimits, EngineRequest, TokenOutput
from nbdist.serve.queueing import admit
from nbdist.serve.request import check_prompt, check_sampling, room_of
from nbdist.serve.sampling import Sampler, logprob_of

if TYPE_CHECKING:
    from torch import nn

    from nbdist.messages import TokenLogprob
    from nbdist.serve.adapt import ServedModel

__all__ = ["ReferenceEngine", "continue_alone"]


class ReferenceEngine:
    """Static batches: a step takes what waits, up to `max_batch`, and runs it to its end.

    Greedy requests to a Hugging Face model go through its `generate`, padded to the longest
    prompt and run to the longest answer. All others are continued one at a time.

    Args:
        model: in eval mode.
        max_batch: most requests of a static batch.
        max_waiting: most requests that wait beyond them.
    """

    name = "reference"

    def __init__(self, model: nn.Module, *, max_batch: int = 8, max_waiting: int = 64) -> None:
        self._face = adapted(model)
        self._model: Any = model
        self._max_waiting = max_waiting
        self._requests: dict[str, EngineRequest] = {}
        self._num_steps = 0
        self.limits = EngineLimits(
            vocab_size=self._face.vocab_size,
            context_length=self._face.context_length,
            max_batch=max_batch,
            capacity_tokens=self._face.context_length * max_batch,
        )

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def submit(self, request: EngineRequest) -> None:
        """See `Engine.submit`."""
        check_sampling(request.sampling)
        check_prompt(request.prompt_ids, self.limits)
        admit(request, self._requests, self.limits, self._max_waiting)

    def cancel(self, request_id: str) -> bool:
        """See `Engine.cancel`; what runs already runs to its end, unheard."""
        return self._requests.pop(request_id, None) is not None

    def wait_seconds(self) -> float | None:
        """See `Engine.wait_seconds`."""
        return 0.0 if self._requests else None

    def step(self) -> list[TokenOutput]:
        """Run one static batch to its end."""
        batch = list(self._requests.values())[: self.limits.max_batch]
        if not batch:
            return []
        self._num_steps += 1
        together = [request for request in batch if self._can_batch(request)]
        outputs = []
        try:
            made = self._generate(together) if together else []
        except Exception as error:  # noqa: BLE001 - becomes the requests' ending
            outputs = [_failed(request, error) for request in together]
        else:
            outputs = [
                self._output(request, tokens, (), len(batch))
                for request, tokens in zip(together, made, strict=True)
            ]
        outputs += [self._alone(r, len(batch)) for r in batch if r not in together]
        for request in batch:
            del self._requests[request.request_id]
        return outputs

    def stats(self) -> EngineStats:
        """See `Engine.stats`; it keeps no cache between steps."""
        return EngineStats(num_waiting=len(self._requests), num_steps=self._num_steps)

    def new_version(self) -> None:
        """See `Engine.new_version`; nothing is kept that could be stale."""

    def close(self) -> None:
        """See `Engine.close`."""
        self._requests.clear()

    def _can_batch(self, request: EngineRequest) -> bool:
        greedy = Sampler(request.sampling).plain_greedy and request.sampling.logprobs is None
        return greedy and isinstance(self._face, HuggingFaceModel)

    def _alone(self, request: EngineRequest, batch_size: int) -> TokenOutput:
        try:
            room = room_of(request, self.limits)
            tokens, logprobs = continue_alone(self._face, request, room)
        except Exception as error:  # noqa: BLE001 - becomes the request's ending
            return _failed(request, error)
        return self._output(request, tokens, logprobs, batch_size)

    @torch.inference_mode()
    def _generate(self, batch: list[EngineRequest]) -> list[list[int]]:
        """Continue greedy requests in one padded batch of transformers' `generate`."""
        longest = max(len(request.prompt_ids) for request in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, request in enumerate(batch):
            first = longest - len(request.prompt_ids)
            tokens[row, first:] = torch.tensor(request.prompt_ids)
            mask[row, first:] = 1
        room = max(room_of(request, self.limits) for request in batch)
        ends = {r.end_token_id for r in batch}
        with self._face.own_attention():  # type: ignore[attr-defined]
            made = self._model.generate(
                tokens.to(self._face.device),
                attention_mask=mask.to(self._face.device),
                max_new_tokens=room,
                do_sample=False,
                eos_token_id=ends.pop() if len(ends) == 1 else None,
                pad_token_id=0,
            )
        return [row[longest:] for row in made.tolist()]

    def _output(
        self,
        request: EngineRequest,
        tokens: list[int],
        logprobs: tuple[TokenLogprob, ...],
        batch_size: int,
    ) -> TokenOutput:
        tokens = tokens[: room_of(request, self.limits)]
        reason = "length"
        if request.end_token_id in tokens:
            tokens = tokens[: tokens.index(request.end_token_id) + 1]
            reason = "stop"
        return TokenOutput(
            request_id=request.request_id,
            token_ids=tokens,
            finish_reason=reason,  # type: ignore[arg-type]
            batch_size=batch_size,
            logprobs=logprobs,
        )


@torch.inference_mode()
def continue_alone(
    face: ServedModel, request: EngineRequest, room: int
) -> tuple[list[int], tuple[TokenLogprob, ...]]:
    """Continue one prompt, computing everything anew for each token: no cache, no batch."""
    sampler = Sampler(request.sampling, request.prompt_ids)
    ids = list(request.prompt_ids)
    logprobs = []
    while len(ids) < len(request.prompt_ids) + room:
        logits = face.plain(torch.tensor([ids], device=face.device))[0, -1]
        if not logits.isfinite().all():
            raise FloatingPointError("the logits are not finite: the weights diverged")
        token = sampler.choose(logits)
        sampler.note(token)
        ids.append(token)
        if request.sampling.logprobs is not None:
            logprobs.append(logprob_of(logits, token, request.sampling.logprobs))
        if token == request.end_token_id:
            break
    return ids[len(request.prompt_ids) :], tuple(logprobs)


def _failed(request: EngineRequest, error: Exception) -> TokenOutput:
    return TokenOutput(
        request_id=request.request_id,
        token_ids=[],
        finish_reason="error",
        detail=f"the batch raised {type(error).__name__}: {error}; send the request again",
    )
