"""A replica: one thread that serves one resident model on one rank (rank)."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from typing import TYPE_CHECKING, Literal

import torch

from nbdist.messages import CancelRequest, EngineStats, GenerateRequest, ModelServed
from nbdist.serve.adapt import adapted
from nbdist.serve.batcher import Batcher
from nbdist.serve.desk import desk_of
from nbdist.serve.drafting import DraftModelProposer
from nbdist.serve.engines import make_engine
from nbdist.serve.ports import current_port
from nbdist.serve.quantise import check_bits, quantise, weight_bytes
from nbdist.serve.resident import resident_copy
from nbdist.serve.speculative import NGramProposer, Speculation

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer
    from torch import nn

    from nbdist.messages import Message
    from nbdist.serve.engines import EngineName
    from nbdist.serve.ports import RankPort
    from nbdist.serve.quantise import Bits

__all__ = ["Replica", "serve"]

_log = logging.getLogger(__name__)

# tried in this order when `end_token` is not given
_END_TOKENS = ("<|endoftext|>", "<|im_end|>", "</s>", "<eos>", "[EOS]")


def serve(
    model: nn.Module,
    tokenizer: Tokenizer,
    name: str = "default",
    *,
    max_batch: int = 8,
    window_seconds: float = 0.01,
    max_waiting: int = 64,
    end_token: str | None = None,
    cache_tokens: int | None = None,
    engine: EngineName = "auto",
    speculation: nn.Module | Literal["ngram"] | None = None,
    weight_bits: Bits | None = None,
    port: RankPort | None = None,
) -> Replica:
    """Serve a copy of `model` from this rank, beside whatever the rank trains or runs.

    Collective over: all ranks that hold the model. Each of them becomes a replica of its own, and
    the client's router spreads the requests. The copy holds the *whole* model on every rank:
    serving costs the full weights once more, plus the cache of the running requests; a model that
    fits only in shards cannot be served this way. Training goes on undisturbed: the copy, its
    thread and its random generators share nothing with it, and later updates of `model` show
    only when `serve` is called again. That replaces the replica of this name: its version goes up
    by one, and its running requests end as `cancelled`.

    Args:
        model: a `DecoderLM`, sharded or not, a module with the same `config` and `forward`, or a
            decoder of transformers.
        tokenizer: a `tokenizers.Tokenizer`, or what has one as `backend_tokenizer`.
        name: the name that requests ask for.
        max_batch: most requests that run in one step.
        window_seconds: how long an idle replica waits for more requests after the first.
        max_waiting: most requests that wait for a slot; more are refused.
        end_token: ends an answer; by default the first of <|endoftext|>, <|im_end|>, </s>, <eos>
            and [EOS] that the tokenizer has.
        cache_tokens: most tokens that the cache of `native` holds; a prompt that cannot fit is
            refused. By default `max_batch` contexts, cut to 1 GiB but never below one context.
        engine: what runs it: `native`, `hf` (transformers' continuous batching, greedy only),
            `reference` (static batches), or `auto` for the first that gives the right tokens.
        speculation: guess tokens ahead where it pays: `ngram` by what followed the same words
            before, or by a small draft model of the same vocabulary. Engine `native` only; it
            changes no answer.
        weight_bits: keep the copy's linear weights in 8 or 4 bits; see `nbdist.serve.quantise`.
            It changes answers a little and saves memory; the copy is whole while it is made.
        port: the rank's way to the client; by default the one of this process.

    Returns:
        The running replica; `replica.stop()` ends it and frees its memory.

    Raises:
        ServeError: this process is not a rank, or a copy of the model cannot be built.
        ValueError: an argument is out of its range; nothing was gathered.
    """
    if max_batch < 1 or max_waiting < 0 or window_seconds < 0:
        raise ValueError(
            f"max_batch={max_batch}, max_waiting={max_waiting}, window_seconds={window_seconds}: "
            "a replica needs max_batch >= 1 and the others >= 0"
        )
    check_bits(weight_bits)
    port = port or current_port()
    plain: Tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    end_token_id = _end_token_id(plain, end_token)
    resident = resident_copy(model)
    if weight_bits is not None:
        quantise(resident, weight_bits)
    running = make_engine(
        engine,
        resident,
        max_batch=max_batch,
        window_seconds=window_seconds,
        max_waiting=max_waiting,
        cache_tokens=cache_tokens,
        speculation=_speculation(speculation, resident, max_batch),
    )
    batcher = Batcher(running, plain, emit=port.emit, end_token_id=end_token_id, rank=port.rank)
    return _install(batcher, resident, name, port)


def _install(batcher: Batcher, resident: nn.Module, name: str, port: RankPort) -> Replica:
    """Start the replica's thread and let it answer for its name."""
    desk = desk_of(port)
    served = ModelServed(
        rank=port.rank,
        model=name,
        version=desk.next_version(name),
        max_batch=batcher.engine.limits.max_batch,
        context_length=batcher.engine.limits.context_length,
        engine=batcher.engine.name,
        weights_bytes=weight_bytes(resident),
    )
    device = next(resident.parameters()).device
    replica = Replica(batcher, served, on_end=desk.remove, device=device)
    desk.install(replica)
    return replica


class Replica:
    """The thread that serves one model; made by `serve`.

    Args:
        batcher: does the work; touched by the thread only.
        served: how the replica introduces itself.
        on_end: called once, with the replica, when it takes no more requests.
        device: of the model.
    """

    def __init__(
        self,
        batcher: Batcher,
        served: ModelServed,
        *,
        on_end: Callable[[Replica], None],
        device: torch.device,
    ) -> None:
        self.served = served
        self._batcher: Batcher | None = batcher
        self._stats: Callable[[], EngineStats] = batcher.engine.stats
        self._on_end = on_end
        self._device = device
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open, self._draining = True, False
        self._end = ("cancelled", "")
        self._thread = threading.Thread(
            target=self._run, name=f"nbdist-serve-{served.model}-{served.version}", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        state = "serving" if self.running else "stopped"
        s = self.served
        return (
            f"Replica(model={s.model!r}, version={s.version}, rank={s.rank}, "
            f"max_batch={s.max_batch}, engine={s.engine!r}, {state})"
        )

    @property
    def running(self) -> bool:
        """Whether it takes requests."""
        return self._open

    def stats(self) -> EngineStats:
        """Return what its engine is doing, as it is between or within two steps."""
        return self._stats()

    def put(self, message: Message) -> bool:
        """Hand over a `GenerateRequest` or `CancelRequest`; False when the replica has stopped."""
        with self._lock:
            takes = self._open or (self._draining and isinstance(message, CancelRequest))
            if takes:
                self._inbox.put(message)
            return takes

    def drain(self, *, wait: bool = True) -> None:
        """Take no more requests and end after those that run; wait until the memory is free."""
        with self._lock:
            if self._open:
                self._open, self._draining = False, True
                self._inbox.put(CancelRequest(request_id=""))  # wakes an idle thread
        if wait:
            self._thread.join()
            self._on_end(self)

    def stop(self, detail: str = "", *, timeout_seconds: float = 10.0) -> None:
        """Take no more requests, end the running ones as `cancelled`, and free the memory.

        Args:
            detail: told to those whose requests end.
            timeout_seconds: how long to wait for the step that runs.
        """
        with self._lock:
            if self._open or self._draining:
                self._open = self._draining = False
                detail = detail or f"`stop` ended the replica of model {self.served.model!r}"
                self._end = ("cancelled", detail)
                self._inbox.put(None)
        self._on_end(self)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            _log.warning("%r is still in a step after %s s", self, timeout_seconds)

    def _run(self) -> None:
        batcher, self._batcher = self._batcher, None
        assert batcher is not None, "a replica's thread runs once"
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else None
        with on_device or contextlib.nullcontext():
            try:
                while self._receive(batcher):
                    batcher.step()
            except Exception as error:  # noqa: BLE001 - becomes the requests' ending
                _log.exception("%r ended", self)
                detail = (
                    f"the replica of model {self.served.model!r} on rank {self.served.rank} ended "
                    f"by {type(error).__name__}: {error}; call `serve` again"
                )
                with self._lock:
                    self._open = self._draining = False
                    self._end = ("error", detail)
                self._on_end(self)
            while not self._inbox.empty():  # what came before the door closed
                self._handle(batcher, self._inbox.get_nowait())
            batcher.end_all(*self._end)
            batcher.close()
            self._stats = EngineStats  # the engine, and with it the weights, is let go

    def _receive(self, batcher: Batcher) -> bool:
        """Take all messages that are there, waiting when there is no work; False at the end."""
        if self._draining and self._inbox.empty() and not batcher.num_requests:
            return False
        wait = batcher.wait_seconds()
        try:
            message = self._inbox.get(block=wait != 0.0, timeout=wait or None)
            while self._handle(batcher, message):
                message = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _handle(self, batcher: Batcher, message: Message | None) -> bool:
        if isinstance(message, GenerateRequest):
            batcher.submit(message)
        elif isinstance(message, CancelRequest):
            batcher.cancel(message.request_id)
        return message is not None


def _speculation(
    wanted: nn.Module | Literal["ngram"] | None, target: nn.Module, max_batch: int
) -> Speculation | None:
    if wanted is None:
        return None
    if wanted == "ngram":
        return Speculation(NGramProposer())
    if not isinstance(wanted, torch.nn.Module):
        raise ValueError(  # noqa: TRY004 - other texts are values as well
            f"speculation={wanted!r} is neither 'ngram' nor a draft model; give one"
        )
    draft = resident_copy(wanted)
    sizes = [adapted(model).vocab_size for model in (draft, target)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft model has vocab_size={sizes[0]}, the served one {sizes[1]}; give a draft "
            "model with the same tokenizer"
        )
    tokens = max_batch * adapted(target).context_length
    return Speculation(DraftModelProposer(draft, cache_tokens=tokens))


def _end_token_id(tokenizer: Tokenizer, end_token: str | None) -> int | None:
    wanted = _END_TOKENS if end_token is None else (end_token,)
    ids = [tokenizer.token_to_id(text) for text in wanted]
    found: int | None = next((i for i in ids if i is not None), None)
    if end_token is not None and found is None:
        raise ValueError(
            f"end_token={end_token!r} is not a token of the tokenizer; give one that it has, or "
            "leave it out"
        )
    return found
