"""The `native` engine: continuous batching over a paged cache, in plain torch (rank)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from nbdist.messages import EngineStats
from nbdist.serve.adapt import adapted
from nbdist.serve.blocks import BlockPool
from nbdist.serve.engine import EngineLimits, EngineRequest, TokenOutput
from nbdist.serve.request import check_prompt, check_sampling, room_of
from nbdist.serve.runner import Runner
from nbdist.serve.sampling import Sampler, likeliest, logprob_of
from nbdist.serve.scheduler import Scheduler
from nbdist.serve.sequence import Chunk, Sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from nbdist.messages import TokenLogprob
    from nbdist.serve.adapt import ServedModel
    from nbdist.serve.runner import Computed
    from nbdist.serve.speculative import Speculation

__all__ = ["NativeEngine"]

_MAX_CACHE_BYTES = 2**30


class NativeEngine:
    """Runs nbdist's decoder and Hugging Face decoders; implements `Engine`.

    In float32 the tokens of every request equal those it gets alone, whatever runs beside it.

    Args:
        model: in eval mode; nothing else may write to it while a step runs.
        max_batch: most requests of a step.
        max_waiting, max_step_tokens, window_seconds, clock: see `Scheduler`.
        block_size: tokens of a cache block.
        cache_tokens: most tokens that the cache holds. By default `max_batch` full contexts, cut
            to 1 GiB but never below one context.
        share_prefixes: whether prompts that begin alike share blocks.
        speculation: guesses tokens ahead; none when None. It changes no answer.
    """

    name = "native"

    def __init__(
        self,
        model: nn.Module,
        *,
        max_batch: int = 8,
        max_waiting: int = 64,
        max_step_tokens: int = 256,
        window_seconds: float = 0.0,
        block_size: int = 16,
        cache_tokens: int | None = None,
        share_prefixes: bool = True,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        face = adapted(model)
        cache_tokens = cache_tokens or _default_cache_tokens(face, max_batch)
        num_blocks = -(-cache_tokens // block_size)
        self.pool = BlockPool(num_blocks, block_size, share_prefixes=share_prefixes)
        self._scheduler = Scheduler(
            self.pool,
            max_batch=max_batch,
            max_waiting=max_waiting,
            max_step_tokens=max_step_tokens,
            window_seconds=window_seconds,
            clock=clock,
        )
        self._runner = Runner(face, num_blocks=num_blocks, block_size=block_size)
        self._speculation = speculation
        self._clock = clock
        self._samplers: dict[str, Sampler] = {}
        self._num_steps = 0
        self.limits = EngineLimits(
            vocab_size=face.vocab_size,
            context_length=face.context_length,
            max_batch=max_batch,
            capacity_tokens=num_blocks * block_size,
        )

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._scheduler)

    def submit(self, request: EngineRequest) -> None:
        """See `Engine.submit`."""
        check_sampling(request.sampling)
        check_prompt(request.prompt_ids, self.limits)
        self._scheduler.submit(Sequence(request, list(request.prompt_ids)))
        self._samplers[request.request_id] = Sampler(request.sampling, request.prompt_ids)

    def cancel(self, request_id: str) -> bool:
        """See `Engine.cancel`."""
        self._samplers.pop(request_id, None)
        if self._speculation is not None:
            self._speculation.forget(request_id)
        return self._scheduler.end(request_id) is not None

    def wait_seconds(self) -> float | None:
        """See `Engine.wait_seconds`."""
        return self._scheduler.wait_seconds()

    def step(self) -> list[TokenOutput]:
        """Compute one token of every row that decodes, and pieces of prompts beside them."""
        if self._speculation is not None:
            self._draft(self._speculation)
        chunks = self._scheduler.schedule()
        if not chunks:
            return []
        self._num_steps += 1
        began = self._clock()
        computed = self._runner.forward(chunks)
        outputs = self._outputs(computed)
        if self._speculation is not None and all(c.num_logits == len(c.token_ids) for c in chunks):
            num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
            self._speculation.pace.note_step(num_tokens, self._clock() - began)
        return outputs

    def _draft(self, speculation: Speculation) -> None:
        rows = [row for row in self._scheduler.running if row.num_pending == 1]
        if rows:
            rooms = [room_of(row.request, self.limits) - row.num_generated for row in rows]
            speculation.draft(rows, rooms)

    def _outputs(self, computed: Computed) -> list[TokenOutput]:
        """Make of each chunk's logits what it means for its row."""
        outputs = [self._fail(name, error) for name, error in computed.failed.items()]
        if computed.logits is None:
            return outputs
        logits = computed.logits
        likely, finite = likeliest(logits)
        num_rows, at = len(computed.chunks), 0
        for chunk in computed.chunks:
            here = slice(at, at + chunk.num_logits)
            at = here.stop
            if not chunk.num_logits:
                self._scheduler.computed(chunk, len(chunk.token_ids))
            elif not all(finite[here]):
                outputs.append(self._diverged(chunk.sequence))
            else:
                outputs.append(self._advance(chunk, logits[here], likely[here], num_rows))
        return outputs

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        scheduler, pages = self._scheduler, self._runner.pages
        size = self.pool.block_size
        tokens = sum(row.num_computed for row in scheduler.running)
        held = sum(len(row.blocks) for row in scheduler.running)
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_steps=self._num_steps,
            num_preempted=scheduler.num_preempted,
            used_bytes=tokens * pages.token_bytes,
            shared_bytes=(held - self.pool.num_used) * size * pages.token_bytes,
            paged_bytes=self.pool.num_used * size * pages.token_bytes,
            contiguous_bytes=len(scheduler.running)
            * self.limits.context_length
            * pages.token_bytes,
            capacity_bytes=self.limits.capacity_tokens * pages.token_bytes,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_prefix_tokens=scheduler.num_prefix_tokens,
            num_drafted=self._speculation.pace.num_drafted if self._speculation else 0,
            num_accepted=self._speculation.pace.num_accepted if self._speculation else 0,
        )

    def new_version(self) -> None:
        """See `Engine.new_version`."""
        self.pool.new_version()

    def close(self) -> None:
        """See `Engine.close`."""
        for row in [*self._scheduler.running, *self._scheduler.waiting]:
            self.cancel(row.request_id)

    def _advance(
        self, chunk: Chunk, logits: Tensor, likely: list[int], batch_size: int
    ) -> TokenOutput:
        """Add new tokens to a row, as long as its draft holds; logits (num_logits, V)."""
        row = chunk.sequence
        draft = chunk.token_ids[len(chunk.token_ids) - chunk.num_logits + 1 :]
        try:
            tokens = self._chosen(row, draft, logits, likely)
        except Exception as error:  # noqa: BLE001 - becomes the request's ending
            return self._fail(row.request_id, error)
        row.token_ids += tokens
        row.draft = []
        num_held = len(tokens) - 1
        self._scheduler.computed(chunk, len(chunk.token_ids) - len(draft) + num_held)
        if self._speculation is not None:
            self._speculation.note(row.request_id, len(draft), num_held)
        return self._output(row, tokens, logits, batch_size)

    def _chosen(
        self, row: Sequence, draft: list[int], logits: Tensor, likely: list[int]
    ) -> list[int]:
        """Choose the next token, and the one after it while the draft had it right."""
        sampler = self._samplers[row.request_id]
        tokens: list[int] = []
        for at, guess in enumerate([*draft, None]):
            token = likely[at] if sampler.plain_greedy else sampler.choose(logits[at])
            sampler.note(token)
            tokens.append(token)
            if token != guess or token == row.request.end_token_id:
                break
        return tokens

    def _output(
        self, row: Sequence, tokens: list[int], logits: Tensor, batch_size: int
    ) -> TokenOutput:
        request = row.request
        reason: str | None = None
        if tokens[-1] == request.end_token_id:
            reason = "stop"
        elif row.num_generated >= room_of(request, self.limits):
            reason = "length"
        if reason is not None:
            self.cancel(row.request_id)
        return TokenOutput(
            request_id=row.request_id,
            token_ids=tokens,
            finish_reason=reason,  # type: ignore[arg-type]
            detail=self._mixed(row) if reason else "",
            batch_size=batch_size,
            logprobs=_logprobs(request, tokens, logits),
        )

    def _mixed(self, row: Sequence) -> str:
        if row.first_version == self.pool.version:
            return ""
        return "the weights changed while this request ran: its answer is of both versions"

    def _diverged(self, row: Sequence) -> TokenOutput:
        """End a row whose logits are not finite, so that its blocks harm no later row."""
        self.pool.forget()
        own = self.pool.held_once(row.blocks)
        if own:
            self._runner.wipe(own)
        error = FloatingPointError("the logits are not finite: the weights diverged")
        return self._fail(row.request_id, error)

    def _fail(self, request_id: str, error: Exception) -> TokenOutput:
        self.cancel(request_id)
        return TokenOutput(
            request_id=request_id,
            token_ids=[],
            finish_reason="error",
            detail=(
                f"the step that ran this request raised {type(error).__name__}: {error}; the "
                "replica goes on serving: send the request again, or call `serve` again with good "
                "weights"
            ),
        )


def _default_cache_tokens(face: ServedModel, max_batch: int) -> int:
    token_bytes = face.dtype.itemsize * sum(
        2 * layer.num_kv_heads * layer.head_size for layer in face.layers
    )
    wanted = min(max_batch * face.context_length, _MAX_CACHE_BYTES // token_bytes)
    return max(wanted, face.context_length)


def _logprobs(
    request: EngineRequest, tokens: list[int], logits: Tensor
) -> tuple[TokenLogprob, ...]:
    wanted = request.sampling.logprobs
    if wanted is None:
        return ()
    with torch.inference_mode():
        return tuple(logprob_of(row, t, wanted) for row, t in zip(logits, tokens, strict=False))
