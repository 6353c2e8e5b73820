"""What `serve` makes of its arguments before anything is gathered or started (rank)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from nbdist.serve.adapt import adapted
from nbdist.serve.drafting import DraftModelProposer
from nbdist.serve.quantise import check_bits
from nbdist.serve.resident import resident_copy
from nbdist.serve.speculative import NGramProposer, Speculation

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import nn

    from nbdist.serve.quantise import Bits

__all__ = [
    "When",
    "check_batch",
    "check_together",
    "check_turns",
    "end_token_id_of",
    "speculation_of",
]

When: TypeAlias = Literal["beside", "between_steps"]
"""When the steps of an engine run while its model is trained; see `serve`."""

# tried in this order when `end_token` is not given
_END_TOKENS = ("<|endoftext|>", "<|im_end|>", "</s>", "<eos>", "[EOS]")


def speculation_of(
    wanted: nn.Module | Literal["ngram"] | None, target: nn.Module, max_batch: int
) -> Speculation | None:
    """Return what guesses tokens ahead.

    Raises:
        ValueError: it is no such thing, or a draft model of another vocabulary.
    """
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


def end_token_id_of(tokenizer: Tokenizer, end_token: str | None) -> int | None:
    """Return the token that ends an answer; None when the tokenizer has none.

    Raises:
        ValueError: it was named and is not there.
    """
    wanted = _END_TOKENS if end_token is None else (end_token,)
    ids = [tokenizer.token_to_id(text) for text in wanted]
    found: int | None = next((i for i in ids if i is not None), None)
    if end_token is not None and found is None:
        raise ValueError(
            f"end_token={end_token!r} is not a token of the tokenizer; give one that it has, or "
            "leave it out"
        )
    return found


def check_batch(max_batch: int, max_waiting: int, window_seconds: float) -> None:
    """Refuse sizes that are out of their range.

    Raises:
        ValueError: with what was asked and what to change.
    """
    if max_batch < 1 or max_waiting < 0 or window_seconds < 0:
        raise ValueError(
            f"max_batch={max_batch}, max_waiting={max_waiting}, window_seconds={window_seconds}: "
            "a replica needs max_batch >= 1 and the others >= 0"
        )


def check_turns(when: str, steps_between: int) -> None:
    """Refuse an unknown policy.

    Raises:
        ValueError: with what was asked and what to change.
    """
    if when not in ("beside", "between_steps"):
        raise ValueError(f"when={when!r} is unknown; set 'beside' or 'between_steps'")
    if steps_between < 1:
        raise ValueError(f"steps_between={steps_between} answers nothing; set steps_between >= 1")


def check_together(*, tp: int, share: bool, bits: Bits | None, engine: str, guesses: bool) -> None:
    """Refuse what does not go with several ranks, or with weights that are trained.

    Raises:
        ValueError: with what was asked and what to change.
    """
    check_bits(bits)
    if tp < 1:
        raise ValueError(f"tp={tp} leaves no rank to serve on; set tp >= 1")
    if tp == 1 and not share:
        return
    asked = "share=True" if share else f"tp={tp}"
    if share and tp > 1:
        raise ValueError(
            f"share=True was asked for with tp={tp}, but shared weights lie as `model` does; "
            "leave tp out, or cut the model with parallelize(model, mesh)"
        )
    if bits is not None:
        raise ValueError(
            f"{asked} was asked for with weight_bits={bits}, which rounds a whole copy; leave one "
            "of the two out"
        )
    if engine not in ("auto", "native"):
        raise ValueError(
            f"{asked} was asked for with engine={engine!r}, whose steps cannot be told when to "
            "run; leave engine out"
        )
    if guesses and tp > 1:
        raise ValueError(
            f"{asked} was asked for with speculation, whose pace differs from rank to rank; leave "
            "one of the two out"
        )
