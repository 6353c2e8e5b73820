"""Text in, text events out: what stands between a replica and its engine (rank; torch-free)."""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.errors import Overloaded
from nbdist.messages import GenerateRequest, TokenEvent
from nbdist.serve.engine import EngineRequest
from nbdist.serve.request import check_prompt, check_sampling, check_timeout, room_of
from nbdist.serve.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer

    from nbdist.messages import TokenLogprob
    from nbdist.serve.engine import Engine, TokenOutput

__all__ = ["Batcher"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Row:
    """A request on its way."""

    request: EngineRequest
    text: TextStream
    cut: bool
    deadline: float | None
    num_tokens: int = 0
    batch_size: int = 1


class Batcher:
    """Makes engine requests of texts, and texts of the engine's tokens; used by one thread only.

    Every request that is submitted ends by exactly one event with a finish reason: all ways out
    go through `_end`, which takes a row out once.

    Args:
        engine: runs the model.
        tokenizer: of the model.
        emit: takes the events; must not block.
        end_token_id: ends an answer and is not part of it; None for none.
        rank: named in the events.
        clock: monotonic seconds, for the deadlines.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        emit: Callable[[TokenEvent], None],
        end_token_id: int | None = None,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._emit = emit
        self._end_token_id = end_token_id
        self._rank = rank
        self._clock = clock
        self._rows: dict[str, _Row] = {}

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._rows)

    def wait_seconds(self) -> float | None:
        """How long there is nothing to do: None until a request comes."""
        waits = [self.engine.wait_seconds()]
        if deadlines := [row.deadline for row in self._rows.values() if row.deadline is not None]:
            waits.append(max(0.0, min(deadlines) - self._clock()))
        return min((wait for wait in waits if wait is not None), default=None)

    def submit(self, request: GenerateRequest) -> None:
        """Take a request; one that cannot run ends at once, alone.

        Its reason is `overloaded` when too many wait, and `error` otherwise.
        """
        if request.request_id in self._rows:
            _log.warning("request %s was sent twice; it runs once", request.request_id)
            return
        try:
            row = self._row(request)
            self.engine.submit(row.request)
        except (ValueError, Overloaded) as error:
            reason = "overloaded" if isinstance(error, Overloaded) else "error"
            self._emit(self._event(request.request_id, finish_reason=reason, detail=str(error)))
        except Exception as error:  # noqa: BLE001 - becomes the request's ending
            _log.exception("request %s was refused", request.request_id)
            detail = f"the request could not be read: {_named(error)}; check prompt and sampling"
            self._emit(self._event(request.request_id, finish_reason="error", detail=detail))
        else:
            self._rows[request.request_id] = row

    def cancel(self, request_id: str) -> None:
        """End a request with reason `cancelled`; nothing happens when it has ended before."""
        self._end(request_id, "cancelled")

    def end_all(self, finish_reason: str, detail: str) -> None:
        """End every request with this reason."""
        for request_id in list(self._rows):
            self._end(request_id, finish_reason, detail)

    def step(self) -> None:
        """End what is out of time, let the engine do one step, and send on what it made."""
        self._end_overdue()
        for output in self.engine.step():
            row = self._rows.get(output.request_id)
            if row is None:
                continue
            try:
                self._accept(row, output)
            except Exception as failure:  # noqa: BLE001 - becomes the row's ending
                _log.exception("request %s failed", output.request_id)
                detail = f"its tokens could not be made text: {_named(failure)}; send it again"
                self._end(output.request_id, "error", detail)

    def close(self) -> None:
        """Give back what the engine holds."""
        self.engine.close()

    def _end_overdue(self) -> None:
        now = self._clock()
        for request_id, row in list(self._rows.items()):
            if row.deadline is not None and row.deadline <= now:
                made = f"it has {row.num_tokens} tokens"
                detail = f"the request's time is over, and {made}; give a larger timeout_seconds"
                self._end(request_id, "timeout", detail)

    def _accept(self, row: _Row, output: TokenOutput) -> None:
        request_id = row.request.request_id
        row.batch_size = output.batch_size
        pieces: list[str] = []
        reason = output.finish_reason
        num_shown = 0
        for token in output.token_ids:
            row.num_tokens += 1
            if token == self._end_token_id:
                break
            num_shown += 1
            piece, stopped = row.text.push(token)
            pieces.append(piece)
            if stopped:
                reason = "stop"
                break
        logprobs = self._with_text(output.logprobs[:num_shown])
        if reason is None:
            text = "".join(pieces)
            self._emit(self._event(request_id, row, text=text, logprobs=logprobs))
            return
        if reason != "error":
            pieces.append(row.text.flush())
        detail = output.detail
        if row.cut and reason == "length":
            detail = self._cut_detail()
        self._end(request_id, reason, detail, text="".join(pieces), logprobs=logprobs)

    def _end(
        self,
        request_id: str,
        finish_reason: str,
        detail: str = "",
        *,
        text: str = "",
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        self.engine.cancel(request_id)
        if finish_reason in ("cancelled", "timeout"):
            text = row.text.flush()
        self._emit(
            self._event(
                request_id,
                row,
                text=text,
                finish_reason=finish_reason,
                detail=detail,
                logprobs=logprobs,
            )
        )

    def _row(self, request: GenerateRequest) -> _Row:
        check_sampling(request.sampling)
        check_timeout(request.timeout_seconds)
        prompt_ids = list(self._tokenizer.encode(request.prompt).ids)
        check_prompt(prompt_ids, self.engine.limits)
        wanted = EngineRequest(
            request_id=request.request_id,
            prompt_ids=prompt_ids,
            sampling=request.sampling,
            end_token_id=self._end_token_id,
        )
        return _Row(
            request=wanted,
            text=TextStream(self._tokenizer, prompt_ids, request.sampling.stop),
            cut=room_of(wanted, self.engine.limits) < request.sampling.max_new_tokens,
            deadline=(
                None if request.timeout_seconds is None else self._clock() + request.timeout_seconds
            ),
        )

    def _event(
        self,
        request_id: str,
        row: _Row | None = None,
        *,
        text: str = "",
        finish_reason: str | None = None,
        detail: str = "",
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> TokenEvent:
        return TokenEvent(
            request_id=request_id,
            rank=self._rank,
            index=row.num_tokens if row else 0,
            text=text,
            finish_reason=finish_reason,
            detail=detail,
            batch_size=row.batch_size if row else 1,
            num_prompt_tokens=len(row.request.prompt_ids) if row else 0,
            logprobs=logprobs,
        )

    def _with_text(self, logprobs: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        def text(token_id: int) -> str:
            return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

        return tuple(
            dataclasses.replace(
                one, text=text(one.token_id), top_texts=tuple(map(text, one.top_ids))
            )
            for one in logprobs
        )

    def _cut_detail(self) -> str:
        limits = self.engine.limits
        if limits.capacity_tokens < limits.context_length:
            what = f"the engine's cache of {limits.capacity_tokens} tokens"
        else:
            what = f"the model's context of {limits.context_length} tokens"
        return f"{what} is full; shorten the prompt for a longer answer"


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
