"""Requests in, token events out: the short step that a replica repeats (rank)."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.errors import Overloaded
from nbdist.messages import GenerateRequest, TokenEvent
from nbdist.serve.request import check_prompt, check_sampling
from nbdist.serve.runner import Runner
from nbdist.serve.sampling import Sampler
from nbdist.serve.scheduler import Scheduler
from nbdist.serve.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer
    from torch import Tensor

    from nbdist.train.models.decoder import DecoderLM

__all__ = ["Batcher"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Row:
    """A request on its way."""

    request_id: str
    prompt_ids: list[int]
    limit: int
    cut: bool
    sampler: Sampler
    text: TextStream
    num_tokens: int = 0
    last_token: int = -1

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)


class Batcher:
    """Runs requests together; called by one thread only.

    Every request that is submitted ends by exactly one event with a finish reason: all ways out
    go through the scheduler's `end`, which hands a row out once.

    Args:
        model: resident copy of the weights, in eval mode.
        tokenizer: of the model.
        emit: takes the events; must not block.
        end_token_id: ends an answer and is not part of it; None for none.
        rank: named in the events.
        max_batch, window_seconds, max_waiting, clock: see `Scheduler`.
    """

    def __init__(
        self,
        model: DecoderLM,
        tokenizer: Tokenizer,
        *,
        emit: Callable[[TokenEvent], None],
        end_token_id: int | None = None,
        rank: int = 0,
        max_batch: int = 8,
        window_seconds: float = 0.01,
        max_waiting: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = model.config
        self._tokenizer = tokenizer
        self._emit = emit
        self._end_token_id = end_token_id
        self._rank = rank
        self._runner = Runner(model, max_batch=max_batch)
        self._scheduler: Scheduler[_Row] = Scheduler(
            max_batch=max_batch,
            window_seconds=window_seconds,
            max_waiting=max_waiting,
            clock=clock,
        )

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._scheduler.rows)

    def wait_seconds(self) -> float | None:
        """How long there is nothing to do: None until a request comes."""
        return self._scheduler.wait_seconds()

    def submit(self, request: GenerateRequest) -> None:
        """Take a request; one that cannot run ends at once, alone, with reason `error`."""
        if request.request_id in self._scheduler:
            _log.warning("request %s was sent twice; it runs once", request.request_id)
            return
        try:
            self._scheduler.submit(self._row(request))
        except (ValueError, Overloaded) as error:
            self._emit(self._event(request.request_id, finish_reason="error", detail=str(error)))
        except Exception as error:  # noqa: BLE001 - becomes the request's ending
            _log.exception("request %s was refused", request.request_id)
            detail = f"the request could not be read: {_named(error)}; check prompt and sampling"
            self._emit(self._event(request.request_id, finish_reason="error", detail=detail))

    def cancel(self, request_id: str) -> None:
        """End a request with reason `cancelled`; nothing happens when it has ended before."""
        self._end(request_id, "cancelled")

    def end_all(self, finish_reason: str, detail: str) -> None:
        """End every request with this reason."""
        for row in self._scheduler.rows:
            self._end(row.request_id, finish_reason, detail)

    def step(self) -> None:
        """One decode step for the running rows, then one prefill for those that join."""
        if rows := list(self._scheduler.active):
            self._advance(rows, lambda: self._runner.decode([row.last_token for row in rows]))
        if joining := self._scheduler.take():
            self._advance(joining, lambda: self._runner.prefill([r.prompt_ids for r in joining]))

    def _advance(self, rows: list[_Row], forward: Callable[[], Tensor]) -> None:
        """Add a token to each row; an exception ends the rows that it concerns and no other."""
        try:
            logits = forward()
            finite = logits.amax(dim=-1).isfinite().tolist()
            likely = logits.argmax(dim=-1).tolist()  # one transfer for all greedy rows
        except Exception as raised:  # noqa: BLE001 - becomes the rows' ending
            _log.exception("a step of %d rows failed", len(rows))
            self._fail(rows, raised)
            return
        for row, row_logits, ok, first in zip(rows, logits, finite, likely, strict=True):
            if not ok:
                error = FloatingPointError("the logits are not finite: the weights diverged")
                self._end(row.request_id, "error", _failed(error))
                continue
            try:
                token = first if row.sampler.greedy else row.sampler.choose(row_logits)
                self._accept(row, token, len(rows))
            except Exception as failure:  # noqa: BLE001 - becomes the row's ending
                _log.exception("request %s failed", row.request_id)
                self._end(row.request_id, "error", _failed(failure))

    def _accept(self, row: _Row, token: int, batch_size: int) -> None:
        row.num_tokens += 1
        row.last_token = token
        text, reason = "", None
        if token == self._end_token_id:
            text, reason = row.text.flush(), "stop"
        else:
            text, stopped = row.text.push(token)
            if stopped:
                reason = "stop"
            elif row.num_tokens == row.limit:
                text, reason = text + row.text.flush(), "length"
        if reason is None:
            self._emit(self._event(row.request_id, row, text=text, batch_size=batch_size))
        else:
            detail = self._cut_detail() if row.cut and reason == "length" else ""
            self._end(row.request_id, reason, detail, text=text, batch_size=batch_size)

    def _fail(self, rows: list[_Row], error: Exception) -> None:
        """End the rows of a forward that raised; the replica lives on."""
        if len(rows) == len(self._scheduler.active):
            self._runner.clear()
        for row in reversed(rows):
            # a failed prefill has closed its slots already: they are the last ones
            self._scheduler.end(row.request_id)
            self._emit(
                self._event(row.request_id, row, finish_reason="error", detail=_failed(error))
            )

    def _end(
        self, request_id: str, finish_reason: str, detail: str = "", *, text: str = "", **more: int
    ) -> None:
        slot = self._scheduler.slot(request_id)
        row = self._scheduler.end(request_id)
        if row is None:
            return
        if slot is not None:
            self._runner.drop(slot)
        if finish_reason == "cancelled":
            text = row.text.flush()
        self._emit(
            self._event(
                request_id, row, text=text, finish_reason=finish_reason, detail=detail, **more
            )
        )

    def _row(self, request: GenerateRequest) -> _Row:
        sampling = request.sampling
        check_sampling(sampling)
        prompt_ids = list(self._tokenizer.encode(request.prompt).ids)
        room = self._config.context_length - len(prompt_ids)
        check_prompt(
            prompt_ids,
            context_length=self._config.context_length,
            vocab_size=self._config.vocab_size,
        )
        return _Row(
            request_id=request.request_id,
            prompt_ids=prompt_ids,
            limit=min(sampling.max_new_tokens, room),
            cut=room < sampling.max_new_tokens,
            sampler=Sampler(sampling),
            text=TextStream(self._tokenizer, prompt_ids, sampling.stop),
        )

    def _event(
        self,
        request_id: str,
        row: _Row | None = None,
        *,
        text: str = "",
        finish_reason: str | None = None,
        detail: str = "",
        batch_size: int = 1,
    ) -> TokenEvent:
        return TokenEvent(
            request_id=request_id,
            rank=self._rank,
            index=row.num_tokens if row else 0,
            text=text,
            finish_reason=finish_reason,
            detail=detail,
            batch_size=batch_size,
            num_prompt_tokens=row.num_prompt_tokens if row else 0,
        )

    def _cut_detail(self) -> str:
        return (
            f"the model's context of {self._config.context_length} tokens is full; "
            "shorten the prompt for a longer answer"
        )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _failed(error: Exception) -> str:
    return (
        f"the step that ran this request raised {_named(error)}; the replica goes on serving: "
        "send the request again, or call `serve` again with good weights"
    )
