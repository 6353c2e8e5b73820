"""`serve`: what a rank does to answer prompts with a model (rank)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from nbdist.serve.answering import Replica
from nbdist.serve.crew import crew_of, served_model
from nbdist.serve.engines import make_engine
from nbdist.serve.live import live_weights
from nbdist.serve.options import (
    check_batch,
    check_together,
    check_turns,
    end_token_id_of,
    speculation_of,
)
from nbdist.serve.ports import current_port
from nbdist.serve.quantise import weight_bytes
from nbdist.serve.seat import Seat

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import nn

    from nbdist.serve.engines import EngineName
    from nbdist.serve.follower import Follower
    from nbdist.serve.options import When
    from nbdist.serve.ports import RankPort
    from nbdist.serve.quantise import Bits

__all__ = ["Replica", "serve"]


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
    tp: int = 1,
    share: bool = False,
    when: When = "beside",
    steps_between: int = 4,
    port: RankPort | None = None,
) -> Replica | Follower:
    """Serve `model` from this rank, beside whatever the rank trains or runs.

    Collective over: all ranks that hold the model. Each of them becomes a replica of its own, and
    the client's router spreads the requests. By default each takes a copy of the *whole* model:
    the full weights once more, plus the cache of the running requests. The copy, its thread and
    its random generators share nothing with training, and later updates of `model` show only when
    `serve` is called again. That replaces the replica of this name: its version goes up by one,
    and its running requests end as `cancelled`.

    With `tp=2` two ranks hold half of a copy each and answer as one replica. With `share=True`
    nothing is copied: the weights of `model` are served, whole, in DDP, in FSDP2's shards or cut
    over `tp`, and those who hold parts of one model answer as one. docs/serving.md has what waits
    for what.

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
        cache_tokens: most tokens that the cache of `native` or `vllm` holds; a prompt that cannot
            fit is refused. By default `max_batch` contexts, cut to 1 GiB but never below one
            context.
        engine: what runs it: `native`, `hf` (transformers' continuous batching, greedy only),
            `vllm`, `reference` (static batches), or `auto` for the first of the others that gives
            the right tokens.
        speculation: guess tokens ahead where it pays: `ngram` by what followed the same words
            before, or by a small draft model of the same vocabulary. Engine `native` only; it
            changes no answer.
        weight_bits: keep the copy's linear weights in 8 or 4 bits; see `nbdist.serve.quantise`.
            It changes answers a little and saves memory; the copy is whole while it is made.
        tp: ranks that share one copy, of a model whose plan `parallelize` knows; neighbours in
            rank. The first of them answers. Engine `native` only, as with `share`.
        share: serve the weights of `model` themselves. An optimizer step waits for the serving
            step that runs and voids what was cached; its result shows at once. An answer that
            spans it says so in its detail.
        when: "beside" serves in a thread of its own at any time. "between_steps" serves, while
            `model` is trained, only after an optimizer step, on the thread that made it.
        steps_between: most serving steps after one optimizer step.
        port: the rank's way to the client; by default the one of this process.

    Returns:
        The running replica, or this rank's part of one that another rank answers for;
        `replica.stop()`, on all its ranks, ends it and frees its memory.

    Raises:
        ServeError: this process is not a rank, or the model cannot be copied, cut or shared.
        ValueError: an argument is out of its range; nothing was gathered.
    """
    check_batch(max_batch, max_waiting, window_seconds)
    guesses, turns = speculation is not None, when == "between_steps"
    check_together(tp=tp, share=share, bits=weight_bits, engine=engine, guesses=guesses)
    check_turns(when, steps_between)
    port = port or current_port()
    plain: Tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    end_token_id = end_token_id_of(plain, end_token)
    crew = crew_of(model, tp=tp, share=share, turns=turns, guesses=guesses)
    resident = served_model(model, crew, share=share, bits=weight_bits)
    running = make_engine(
        "native" if (share or crew) and engine == "auto" else engine, resident,
        max_batch=max_batch, max_waiting=max_waiting, window_seconds=window_seconds,
        cache_tokens=cache_tokens, clock=crew.clock if crew else time.monotonic,
        speculation=speculation_of(speculation, resident, max_batch),
    )  # fmt: skip
    weights = live_weights(model, share=share, turns=turns)
    device = next(resident.parameters()).device
    seat = Seat(running, device, crew, weights, port, weight_bytes(resident))
    return seat.take(name, plain, end_token_id, steps_between)
