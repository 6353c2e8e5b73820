"""The `vllm` engine: vLLM in a process of its own, behind our books (rank).

The weights reach it as a directory that is removed when it has read them. It answers one message at
a time, so nothing is computed that was not asked for, and one that dies takes no request with it: a
new one gets those that ran, with the tokens that they have.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.errors import ServeError
from nbdist.messages import EngineStats
from nbdist.serve.adapt import HuggingFaceModel, adapted
from nbdist.serve.engine import EngineRequest, TokenOutput
from nbdist.serve.queueing import admit
from nbdist.serve.request import check_prompt, check_sampling, room_of
from nbdist.serve.vllm_child import Child, VllmProcessError
from nbdist.serve.vllm_export import check_exportable, export
from nbdist.serve.vllm_params import can_go_on, check_ranges, logprobs_of, params_of, sized

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


__all__ = ["VllmEngine"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    request: EngineRequest
    version: int
    token_ids: list[int] = field(default_factory=list)
    num_deaths: int = 0  # of processes that had it


class VllmEngine:
    """Continuous batching by vLLM.

    It holds the weights once more, beside the model that it was made of.

    Args:
        model: a decoder of transformers or a dense `DecoderLM`, in eval mode.
        max_batch: most requests of a step.
        max_waiting: most requests that wait beyond them.
        cache_tokens: most tokens that the cache holds. By default `max_batch` full contexts, cut
            to 1 GiB but never below one context.
        block_size: tokens of a cache block; vLLM's CPU kernels want a multiple of 32.

    Raises:
        ServeError: vLLM is not installed here, does not know the model, or failed to load it.
    """

    name = "vllm"

    def __init__(
        self,
        model: nn.Module,
        *,
        max_batch: int = 8,
        max_waiting: int = 64,
        cache_tokens: int | None = None,
        block_size: int = 32,
    ) -> None:
        check_exportable(model)
        face = adapted(model)
        if isinstance(face, HuggingFaceModel):
            face.restore()
        self.limits, self._options = sized(
            face, max_batch=max_batch, cache_tokens=cache_tokens, block_size=block_size
        )
        self._model = model
        self._max_waiting = max_waiting
        self._known: dict[str, EngineRequest] = {}
        self._rows: dict[str, _Row] = {}  # by the id that vLLM knows
        self._ids: dict[str, str] = {}  # ours to theirs
        self._numbers = itertools.count()
        self._new: list[str] = []  # not there yet
        self._there: set[str] = set()
        self._suspects: list[str] = []  # were there when a process died
        self._gone: list[str] = []  # to be dropped there
        self._version = 0
        self._num_steps = 0
        self.num_restarts = 0
        self._device = face.device
        self._child = self._start()

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._known)

    @property
    def process_id(self) -> int:
        """Of vLLM's process now: its memory and processor time are this engine's."""
        return self._child.pid

    def submit(self, request: EngineRequest) -> None:
        """See `Engine.submit`.

        Raises:
            ValueError: also when a value is outside of what vLLM takes.
        """
        check_sampling(request.sampling)
        check_prompt(request.prompt_ids, self.limits)
        check_ranges(request.sampling)
        admit(request, self._known, self.limits, self._max_waiting)
        self._send(_Row(request, self._version))

    def cancel(self, request_id: str) -> bool:
        """See `Engine.cancel`."""
        theirs = self._ids.get(request_id)
        if theirs is None:
            return False
        if theirs in self._there:
            self._gone.append(theirs)
        self._forget(theirs)
        return True

    def wait_seconds(self) -> float | None:
        """See `Engine.wait_seconds`."""
        return 0.0 if self._known else None

    def step(self) -> list[TokenOutput]:
        """Let vLLM do one step, and pass on what it has made."""
        if not self._known:
            return []
        new = self._joining()
        asked = {"drop": self._gone, "add": [self._asked(theirs) for theirs in new]}
        self._gone = []
        self._there.update(new)
        try:
            made = self._child.ask(asked)["outputs"]
        except VllmProcessError as died:
            return self._restart(died)
        self._num_steps += 1
        return [self._take(one, len(made)) for one in made if one["id"] in self._rows]

    def stats(self) -> EngineStats:
        """See `Engine.stats`; of its cache vLLM tells nothing here."""
        running = min(len(self._known), self.limits.max_batch)
        return EngineStats(
            num_running=running,
            num_waiting=len(self._known) - running,
            num_steps=self._num_steps,
        )

    def new_version(self) -> None:
        """See `Engine.new_version`; rows that run are computed anew with the new weights."""
        self._version += 1
        try:
            self._with_weights(lambda folder: self._child.ask({"reload": folder}))
        except VllmProcessError as died:
            _log.warning("%s; the next step starts it with the new weights", died)

    def close(self) -> None:
        """See `Engine.close`."""
        for theirs in list(self._rows):
            self._forget(theirs)
        self._child.close()

    def _start(self) -> Child:
        child = Child(self._device)
        try:
            self._with_weights(
                lambda folder: child.ask({"folder": folder, "options": self._options})
            )
        except VllmProcessError as died:
            child.close()
            raise ServeError(
                f"engine='vllm' was asked for a {type(self._model).__name__}, and {died}; serve it "
                "with engine='native' or 'hf'"
            ) from died
        except BaseException:
            child.close()
            raise
        return child

    def _with_weights(self, use: Callable[[str], Any]) -> None:
        """Write the weights as they are now, for as long as they are read."""
        with tempfile.TemporaryDirectory(prefix="nbdist-vllm-") as folder:
            export(self._model, Path(folder))
            use(folder)

    def _send(self, row: _Row) -> None:
        theirs = f"nbdist-{next(self._numbers)}"
        self._rows[theirs] = row
        self._ids[row.request.request_id] = theirs
        self._new.append(theirs)

    def _joining(self) -> list[str]:
        """Take what goes to vLLM now: all, but each alone of those that a process died with."""
        if not self._suspects:
            new, self._new = self._new, []
            return new
        return [] if self._there else [self._suspects.pop(0)]

    def _asked(self, theirs: str) -> dict[str, Any]:
        row = self._rows[theirs]
        request = row.request
        room = room_of(request, self.limits) - len(row.token_ids)
        return {
            "id": theirs,
            "prompt": [*request.prompt_ids, *row.token_ids],
            "sampling": params_of(request.sampling, room=room, end_token_id=request.end_token_id),
        }

    def _take(self, made: dict[str, Any], batch_size: int) -> TokenOutput:
        row, new = self._rows[made["id"]], made["tokens"]
        request = row.request
        row.token_ids += new
        reason: Any = None
        if made["error"]:
            reason = "error"
        elif new and new[-1] == request.end_token_id:
            reason = "stop"
        elif len(row.token_ids) >= room_of(request, self.limits):
            reason = "length"
        if reason is not None:
            self._forget(made["id"])
        return TokenOutput(
            request_id=request.request_id,
            token_ids=new,
            finish_reason=reason,
            detail=made["error"] or (self._mixed(row) if reason else ""),
            batch_size=batch_size,
            logprobs=logprobs_of(new, made["logprobs"], request.sampling.logprobs),
        )

    def _forget(self, theirs: str) -> None:
        request_id = self._rows.pop(theirs).request.request_id
        del self._ids[request_id], self._known[request_id]
        self._there.discard(theirs)
        for waiting in (self._new, self._suspects):
            if theirs in waiting:
                waiting.remove(theirs)

    def _mixed(self, row: _Row) -> str:
        if row.version == self._version:
            return ""
        return "the weights changed while this request ran: its answer is of both versions"

    def _restart(self, died: VllmProcessError) -> list[TokenOutput]:
        """Start anew; what was there goes on with the tokens it has, one at a time.

        One that a process died with twice was alone the second time: it is the cause.
        """
        self.num_restarts += 1
        _log.error("%s; a new one takes over its requests", died)
        there = [theirs for theirs in self._rows if theirs in self._there]
        self._there.clear()
        self._gone = []
        self._child.close()
        self._child = self._start()
        outputs = []
        for theirs in there:
            row = self._rows[theirs]
            row.num_deaths += 1
            if row.num_deaths == 1 and (can_go_on(row.request.sampling) or not row.token_ids):
                self._suspects.append(theirs)
                continue
            self._forget(theirs)
            outputs.append(_failed(row.request.request_id, f"{died}; send it again"))
        return outputs


def _failed(request_id: str, detail: str) -> TokenOutput:
    return TokenOutput(request_id=request_id, token_ids=[], finish_reason="error", detail=detail)
