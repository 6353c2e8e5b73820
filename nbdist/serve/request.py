"""What a request may ask for, checked before any tensor is made (anywhere; torch-free)."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from nbdist.messages import Sampling

if TYPE_CHECKING:
    from nbdist.serve.engine import EngineLimits, EngineRequest

__all__ = ["check_prompt", "check_sampling", "check_timeout", "room_of", "sampling_of"]

_MAX_STOPS = 16
_MAX_LOGPROBS = 20


def sampling_of(values: dict[str, Any]) -> Sampling:
    """Return the checked `Sampling` of keyword arguments; `stop` may be one text or several.

    Raises:
        ValueError: there is no such field, or a value is out of its range.
    """
    names = [field.name for field in dataclasses.fields(Sampling)]
    if unknown := sorted(set(values) - set(names)):
        raise ValueError(f"sampling has no field {unknown}; it has {names}")
    stop = values.get("stop", ())
    sampling = Sampling(**{**values, "stop": (stop,) if isinstance(stop, str) else tuple(stop)})
    check_sampling(sampling)
    return sampling


def check_sampling(sampling: Sampling) -> None:
    """Check the values of a request's sampling; they may come from the wire.

    Raises:
        ValueError: a value is out of its range; the text names the field, the value and the range.
    """
    s = sampling
    _whole("max_new_tokens", s.max_new_tokens, least=1)
    _whole("top_k", s.top_k, least=0)
    if not _is_number(s.temperature) or not 0 <= s.temperature < math.inf:
        raise ValueError(
            f"temperature={s.temperature!r} is not a finite number of at least 0; "
            "set 0 for the most likely token, or a value such as 0.8"
        )
    if not _is_number(s.top_p) or not 0 < s.top_p <= 1:
        raise ValueError(
            f"top_p={s.top_p!r} is not in the range 0 < top_p <= 1; set 1.0 to keep all tokens"
        )
    if not _is_number(s.repetition_penalty) or not 0 < s.repetition_penalty < math.inf:
        raise ValueError(
            f"repetition_penalty={s.repetition_penalty!r} is not a finite number above 0; set 1.0 "
            "for none"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if not _is_number(value := getattr(s, name)) or not math.isfinite(value):
            raise ValueError(f"{name}={value!r} is not a finite number; set 0.0 for none")
    if s.logprobs is not None:
        _whole("logprobs", s.logprobs, least=0, most=_MAX_LOGPROBS)
    if s.seed is not None:
        _whole("seed", s.seed, least=0, most=2**63 - 1)
    if len(s.stop) > _MAX_STOPS or not all(isinstance(t, str) and t for t in s.stop):
        raise ValueError(
            f"stop={s.stop!r} is not a list of at most {_MAX_STOPS} non-empty texts; "
            "give texts such as stop=('\\n\\n',)"
        )


def check_timeout(timeout_seconds: float | None) -> None:
    """Check how long a request may take; it may come from the wire.

    Raises:
        ValueError: it is neither None nor a finite number of at least 0.
    """
    given = timeout_seconds
    if given is not None and (not _is_number(given) or not 0 <= given < math.inf):
        raise ValueError(
            f"timeout_seconds={given!r} is not a finite number of at least 0; set one, or None to "
            "wait as long as it takes"
        )


def check_prompt(prompt_ids: list[int], limits: EngineLimits) -> None:
    """Check that a prompt leaves room for a token and names only tokens that the model has.

    Raises:
        ValueError: the prompt is empty, too long for context or cache, or of another tokenizer.
    """
    if not prompt_ids:
        raise ValueError(
            "the prompt holds 0 tokens, and there is nothing to continue; give at least one "
            "character of text"
        )
    what, most = "model's context", limits.context_length
    if limits.capacity_tokens < most:
        what, most = "engine's cache", limits.capacity_tokens
    if len(prompt_ids) >= most:
        raise ValueError(
            f"the prompt holds {len(prompt_ids)} tokens, and the {what} of {most} leaves no room "
            f"for an answer; shorten it to at most {most - 1} tokens"
        )
    if (largest := max(prompt_ids)) >= limits.vocab_size or min(prompt_ids) < 0:
        raise ValueError(
            f"the prompt holds token id {largest if largest >= limits.vocab_size else -1}, but the "
            f"model has vocab_size={limits.vocab_size}; pass `serve` the tokenizer that the model "
            "was trained with"
        )


def room_of(request: EngineRequest, limits: EngineLimits) -> int:
    """Return the most tokens that a request's answer may have here."""
    most = min(limits.context_length, limits.capacity_tokens)
    return min(request.sampling.max_new_tokens, most - len(request.prompt_ids))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(name: str, value: Any, *, least: int, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} is not a whole number of at least {least}; set one")
    if most is not None and value > most:
        raise ValueError(f"{name}={value!r} is above {most}; set a smaller one")
