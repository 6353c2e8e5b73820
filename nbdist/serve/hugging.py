"""The `hf` engine: transformers' continuous batching behind a guard (rank).

transformers 5.24 ends all requests for one that is wrong, tells nobody of a cancelled one, and
reuses cached prefixes of earlier weights. So nothing reaches it unchecked, it sees only ids made
here, every request has its own books here, and when its thread ends a new one takes over what was
running.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbdist.messages import EngineStats
from nbdist.serve.engine import EngineLimits, EngineRequest, TokenOutput
from nbdist.serve.queueing import admit
from nbdist.serve.request import check_prompt, check_sampling, room_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["HuggingFaceEngine"]

_log = logging.getLogger(__name__)

_MAX_RESTARTS = 2  # of one request: a third time it is taken for the cause
_POLL_SECONDS = 0.02
# A failed request may be the first sign of a thread that ends; so long it gets to end.
_MAX_POLLS = 25


@dataclass(slots=True)
class _Row:
    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    num_before: int = 0  # tokens that went in again as prompt after a restart
    num_restarts: int = 0
    error: str = ""
    num_polls: int = 0  # since the error


class HuggingFaceEngine:
    """Greedy continuous batching by transformers.

    Args:
        model: a `PreTrainedModel` in eval mode.
        max_batch: most requests of a step.
        max_waiting: most requests that wait beyond them.
        cache_tokens: most tokens that the cache holds.
        page_size: tokens of a cache page; transformers' own 256 wastes most of it on short rows.
    """

    name = "hf"

    def __init__(
        self,
        model: nn.Module,
        *,
        max_batch: int = 8,
        max_waiting: int = 64,
        cache_tokens: int | None = None,
        page_size: int = 16,
    ) -> None:
        self._model: Any = model
        outer: Any = model.config
        config = outer.get_text_config()
        context = int(config.max_position_embeddings)
        tokens = cache_tokens or max_batch * context
        self._num_blocks = -(-tokens // page_size)
        self._page_size = page_size
        self._max_waiting = max_waiting
        self._known: dict[str, EngineRequest] = {}
        self._rows: dict[str, _Row] = {}  # by the id that transformers knows
        self._ids: dict[str, str] = {}  # ours to theirs
        self._numbers = itertools.count()
        self.num_restarts = 0
        self.limits = EngineLimits(
            vocab_size=config.vocab_size,
            context_length=context,
            max_batch=max_batch,
            # one page is kept back by transformers
            capacity_tokens=(self._num_blocks - 1) * page_size,
        )
        self._manager: Any = self._start()

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._known)

    def submit(self, request: EngineRequest) -> None:
        """See `Engine.submit`.

        Raises:
            ValueError: also when the request is not greedy.
        """
        check_sampling(request.sampling)
        check_prompt(request.prompt_ids, self.limits)
        s = request.sampling
        penalties = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
        if s.temperature or penalties != (1.0, 0.0, 0.0) or s.logprobs is not None:
            raise ValueError(
                f"engine 'hf' was asked for {s}, and it is greedy only: transformers samples all "
                "requests with one generator; set temperature=0 without penalties and logprobs, "
                "or serve with engine='native'"
            )
        admit(request, self._known, self.limits, self._max_waiting)
        self._send(_Row(request))

    def cancel(self, request_id: str) -> bool:
        """See `Engine.cancel`."""
        theirs = self._ids.pop(request_id, None)
        if theirs is not None:
            self._rows.pop(theirs, None)
            self._manager.cancel_request(theirs)
        return self._known.pop(request_id, None) is not None

    def wait_seconds(self) -> float | None:
        """See `Engine.wait_seconds`."""
        return 0.0 if self._known else None

    def step(self) -> list[TokenOutput]:
        """Wait a moment for transformers' thread, and pass on what it has made."""
        if not self._known:
            return []
        outputs: list[TokenOutput] = []
        result = self._manager.get_result(timeout=_POLL_SECONDS)
        while result is not None:
            row = self._rows.get(result.request_id)
            if row is not None:
                outputs += self._take(row, result)
            result = self._manager.get_result(timeout=0)
        if not self._manager.is_running():
            return outputs + self._restart()
        return outputs + self._failed_alone()

    def stats(self) -> EngineStats:
        """See `Engine.stats`; what transformers does not tell is 0."""
        running = min(len(self._known), self.limits.max_batch)
        return EngineStats(num_running=running, num_waiting=len(self._known) - running)

    def new_version(self) -> None:
        """See `Engine.new_version`."""
        with self._manager.pause():
            self._manager.batch_processor.cache.evict_cached_blocks()

    def close(self) -> None:
        """See `Engine.close`."""
        self._known.clear()
        self._rows.clear()
        self._ids.clear()
        self._manager.stop(block=True, timeout=10, hard_stop=True)

    def _start(self) -> Any:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=16
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=self._page_size,
                num_blocks=self._num_blocks,
                max_batch_tokens=max(256, self.limits.max_batch),
                max_requests_per_batch=self.limits.max_batch,
            ),
        )
        manager.start()
        return manager

    def _send(self, row: _Row) -> None:
        theirs = f"nbdist-{next(self._numbers)}"
        request = row.request
        row.num_before = len(row.token_ids)
        self._rows[theirs] = row
        self._ids[request.request_id] = theirs
        self._manager.add_request(
            [*request.prompt_ids, *row.token_ids],
            request_id=theirs,
            max_new_tokens=room_of(request, self.limits) - row.num_before,
            streaming=True,
            eos_token_id=-1 if request.end_token_id is None else request.end_token_id,
        )

    def _take(self, row: _Row, result: Any) -> list[TokenOutput]:
        if result.error is not None:
            row.error = str(result.error)
            return []
        new = list(result.generated_tokens)[len(row.token_ids) - row.num_before :]
        row.token_ids += new
        reason: Any = None
        if row.token_ids and row.token_ids[-1] == row.request.end_token_id:
            reason = "stop"
        elif len(row.token_ids) >= room_of(row.request, self.limits):
            reason = "length"
        if not new and reason is None:
            return []
        return [self._output(row, new, reason)]

    def _output(self, row: _Row, new: list[int], reason: Any, detail: str = "") -> TokenOutput:
        request_id = row.request.request_id
        if reason is not None:
            self._known.pop(request_id, None)
            self._rows.pop(self._ids.pop(request_id, ""), None)
        return TokenOutput(
            request_id=request_id,
            token_ids=new,
            finish_reason=reason,
            detail=detail,
            batch_size=min(len(self._known) + (reason is not None), self.limits.max_batch),
        )

    def _failed_alone(self) -> list[TokenOutput]:
        """End rows that failed while the thread lives on."""
        outputs = []
        for row in [row for row in self._rows.values() if row.error]:
            row.num_polls += 1
            if row.num_polls >= _MAX_POLLS:
                detail = f"transformers' batching refused it: {row.error}; send it again"
                outputs.append(self._output(row, [], "error", detail))
        return outputs

    def _restart(self) -> list[TokenOutput]:
        """Start anew with all that were running, with the tokens they have; drop a repeater."""
        self.num_restarts += 1
        _log.error("transformers' batching thread has ended; a new one takes over its requests")
        rows = list(self._rows.values())
        self._rows.clear()
        self._ids.clear()
        self._manager.stop(block=True, timeout=10, hard_stop=True)
        self._manager = self._start()
        outputs = []
        for row in rows:
            row.num_restarts += 1
            row.error, row.num_polls = "", 0
            if row.num_restarts > _MAX_RESTARTS:
                detail = "transformers' batching ended each time that it ran; send it again alone"
                outputs.append(self._output(row, [], "error", detail))
            else:
                self._send(row)
        return outputs
