"""What vLLM is told of an engine and a request, and what it tells of a token (rank; torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.messages import TokenLogprob
from nbdist.serve.engine import EngineLimits

if TYPE_CHECKING:
    from nbdist.messages import Sampling
    from nbdist.serve.adapt import ServedModel

__all__ = ["can_go_on", "check_ranges", "logprobs_of", "params_of", "sized"]

_MAX_CACHE_BYTES = 2**30
# beside 0; vLLM raises outside of them, or takes another value without a word
_RANGES = {
    "temperature": (0.01, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_SAME = (*_RANGES, "top_k", "top_p", "seed", "repetition_penalty", "logprobs")


def sized(
    face: ServedModel, *, max_batch: int, cache_tokens: int | None, block_size: int
) -> tuple[EngineLimits, dict[str, Any]]:
    """Return what an engine can hold, and the arguments of vLLM's `EngineArgs` that say so."""
    token_bytes = face.dtype.itemsize * sum(
        2 * layer.num_kv_heads * layer.head_size for layer in face.layers
    )
    full = min(max_batch * face.context_length, _MAX_CACHE_BYTES // token_bytes)
    num_blocks = -(-(cache_tokens or max(full, face.context_length)) // block_size)
    limits = EngineLimits(
        vocab_size=face.vocab_size,
        context_length=face.context_length,
        max_batch=max_batch,
        capacity_tokens=num_blocks * block_size,
    )
    num_blocks += 1  # one is kept back by vLLM
    return limits, {
        "dtype": str(face.dtype).removeprefix("torch."),
        "max_model_len": min(limits.context_length, limits.capacity_tokens),
        "max_num_seqs": max_batch,
        "block_size": block_size,
        "num_gpu_blocks_override": num_blocks,
        "kv_cache_memory_bytes": num_blocks * block_size * token_bytes,
        "enforce_eager": face.device.type == "cpu",  # else it compiles for minutes
        "skip_tokenizer_init": True,  # token ids in and out
        "generation_config": "vllm",  # the model's own defaults are not the request's
        "disable_log_stats": True,
        "seed": 0,
    }


def check_ranges(sampling: Sampling) -> None:
    """Refuse what `check_sampling` lets through and vLLM does not take.

    Raises:
        ValueError: the text names the field, the value and the range.
    """
    for name, (least, most) in _RANGES.items():
        value = getattr(sampling, name)
        if value and not least <= value <= most:
            raise ValueError(
                f"{name}={value} was asked for, and engine 'vllm' takes 0 or {least} to {most}; "
                "set such a value, or serve with engine='native'"
            )


def params_of(sampling: Sampling, *, room: int, end_token_id: int | None) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams`; `room` tokens may still be made."""
    return {
        **{name: getattr(sampling, name) for name in _SAME},
        "max_tokens": room,
        "stop_token_ids": [] if end_token_id is None else [end_token_id],
    }


def can_go_on(sampling: Sampling) -> bool:
    """Whether tokens that go in again as prompt lead to the answer that they began.

    vLLM would draw a seed's numbers from their start, and count a prompt for no penalty of these.
    """
    drawn = sampling.temperature > 0 and sampling.seed is not None
    return not (drawn or sampling.presence_penalty or sampling.frequency_penalty)


def logprobs_of(
    tokens: list[int], places: list[dict[str, Any]], num_top: int | None
) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of tokens from an answer of `vllm_process`."""
    if num_top is None:
        return ()
    return tuple(
        TokenLogprob(
            token_id=token,
            logprob=place["chosen"],
            top_ids=tuple(place["ids"][:num_top]),
            top_logprobs=tuple(place["values"][:num_top]),
        )
        for token, place in zip(tokens, places, strict=True)
    )
