"""Tensor-parallel plans: which layers are cut by column and which by row (ranks).

A plan is data: {module name or pattern: style}. In a pattern `*` stands for one part of a name.
Column then row is Megatron's pairing (arXiv 1909.08053): one sum a pair, none inside it.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from nbdist.train.models import DecoderLM

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    Style = str | ParallelStyle
    Plan = dict[str, Style]

__all__ = ["decoders", "expand", "infer_plan"]


@dataclass(frozen=True, slots=True)
class _Pair:
    """Linear layers of one module: the columns take the same input, the row takes their output."""

    columns: tuple[str, ...]
    row: str
    heads: bool = False


_PAIRS = (
    _Pair(("query", "key", "value"), "output", heads=True),  # DecoderLM
    _Pair(("q_proj", "k_proj", "v_proj"), "o_proj", heads=True),  # Llama, Qwen2, Mistral, Gemma
    _Pair(("wq", "wk", "wv"), "wo", heads=True),
    _Pair(("gate", "up"), "down"),  # DecoderLM
    _Pair(("gate_proj", "up_proj"), "down_proj"),
    _Pair(("w1", "w3"), "w2"),
    _Pair(("linear1",), "linear2"),  # nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
    _Pair(("fc1",), "fc2"),
)
_HEAD_SIZES = ("head_size", "head_dim")
_HEADS = ("head", "lm_head")


def infer_plan(model: nn.Module, tp: int) -> Plan:
    """Return a plan for `DecoderLM`, Llama-like Hugging Face models and `nn.Transformer` layers.

    Layers are known by their names inside one module, which may be inside another. Attention of
    `nn.MultiheadAttention` stays whole: it keeps the three projections in one weight. Layers that
    are not named here stay whole.

    Raises:
        ValueError: nothing is known, or heads cannot be dealt to `tp` ranks.
    """
    plan: Plan = {}
    for name, module in model.named_modules():
        for pair in _PAIRS:
            parts = [getattr(module, part, None) for part in (*pair.columns, pair.row)]
            if not all(isinstance(part, nn.Linear) for part in parts):
                continue
            if pair.heads:
                _check_heads(name, module, pair, tp)
            prefix = f"{name}." if name else ""
            plan |= dict.fromkeys((prefix + part for part in pair.columns), "column")
            plan[prefix + pair.row] = "row"
    if not plan:
        raise ValueError(
            f"no tensor-parallel plan is known for {type(model).__name__}: none of its modules "
            f"holds linear layers named {', '.join('/'.join(p.columns) for p in _PAIRS)}; pass "
            'plan={"layers.*.first": "column", "layers.*.second": "row"} with its names'
        )
    plan |= _vocabulary(model)
    return plan


def decoders(model: nn.Module) -> dict[str, DecoderLM]:
    """Return every `DecoderLM` in a model, by what stands before the names of its modules."""
    found = ((name, m) for name, m in model.named_modules() if isinstance(m, DecoderLM))
    return {f"{name}." if name else "": decoder for name, decoder in found}


def _vocabulary(model: nn.Module) -> Plan:
    """Cut the vocabulary of an embedding and of the output projection over it.

    Beside a `DecoderLM`, a module's own embeddings and heads stay whole: it need not be tokens that
    they are of.
    """
    if inside := decoders(model):
        plan: Plan = {f"{prefix}embedding": "embedding" for prefix in inside}
        return plan | {f"{p}head": "vocabulary" for p, decoder in inside.items() if decoder.head}
    heads = [
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _HEADS and isinstance(module, nn.Linear)
    ]
    if not heads:
        return {}
    embedding = next((n for n, m in model.named_modules() if isinstance(m, nn.Embedding)), None)
    plan = dict.fromkeys(heads, "vocabulary")
    if embedding is not None:
        plan[embedding] = "embedding"
    return plan


def _check_heads(name: str, module: nn.Module, pair: _Pair, tp: int) -> None:
    size = next((getattr(module, a) for a in _HEAD_SIZES if hasattr(module, a)), None)
    if size is None:
        raise ValueError(
            f"`{name}` looks like attention, but has no `head_size` or `head_dim`: its heads "
            f"cannot be dealt to tp={tp} ranks; pass plan=... with the layers to cut"
        )
    for part in pair.columns:
        num_heads = getattr(module, part).out_features // size
        if num_heads % tp:
            raise ValueError(
                f"`{name}.{part}` has {num_heads} heads of {size}, which tp={tp} does not divide; "
                f"set tp to a divisor of {num_heads}, or pass plan=... without attention"
            )


def expand(plan: Plan, model: nn.Module) -> Plan:
    """Return a plan with every pattern replaced by the names it stands for.

    Raises:
        ValueError: a pattern names no module.
    """
    names = [name for name, _ in model.named_modules()]
    expanded: Plan = {}
    for pattern, style in plan.items():
        parts = pattern.split(".")
        found = [name for name in names if _matches(name.split("."), parts)]
        if not found:
            close = [name for name in names if name.rpartition(".")[2] == parts[-1]]
            hint = f"; modules with that last name: {close[:3]}" if close else ""
            raise ValueError(
                f"plan names {pattern!r}, but {type(model).__name__} has no such module{hint}; "
                "see dict(model.named_modules())"
            )
        expanded |= dict.fromkeys(found, style)
    return expanded


def _matches(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(map(fnmatch.fnmatchcase, name, pattern))
