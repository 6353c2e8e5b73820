"""Tensor parallelism: layers cut over `tp`, with sequence parallel and parallel loss (ranks)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from nbdist.train.models import DecoderLM, MixtureOfExperts
from nbdist.train.parallelize.plans import decoders, expand, infer_plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from nbdist.train.parallelize.plans import Plan

__all__ = ["resolve_plan", "spread_tensors"]

STYLES = ("column", "row", "embedding", "vocabulary", "sequence")


def resolve_plan(
    model: nn.Module, plan: Plan | None, tp: int, *, sequence_parallel: bool, loss_parallel: bool
) -> Plan:
    """Return the whole plan, checked; touches nothing.

    Raises:
        ValueError: an unknown name or style, or options that need a `DecoderLM`.
    """
    inferred = plan is None
    whole = infer_plan(model, tp) if plan is None else expand(plan, model)
    for name, style in whole.items():
        if not isinstance(style, ParallelStyle) and style not in STYLES:
            raise ValueError(
                f"plan gives {name!r} the style {style!r}; set one of {', '.join(STYLES)}, or a "
                "style of torch.distributed.tensor.parallel"
            )
        _check_even(name, model.get_submodule(name), style, tp)
    if sequence_parallel and not (inferred and decoders(model)):
        raise ValueError(
            f"sequence_parallel=True was asked for {type(model).__name__} with "
            f"{'an inferred' if inferred else 'a given'} plan: where its rows are cut is known for "
            'DecoderLM only; pass plan=... with "sequence" for its norms and torch\'s own styles '
            "for the layers between"
        )
    if sequence_parallel and any(isinstance(m, MixtureOfExperts) for m in model.modules()):
        raise ValueError(
            "sequence_parallel=True was asked for a model with experts, whose routing needs whole "
            "rows; leave sequence_parallel out"
        )
    if loss_parallel and "embedding" not in whole.values() and "vocabulary" not in whole.values():
        raise ValueError(
            "loss_parallel=True needs logits cut over the vocabulary, but the plan has no output "
            'projection with the style "vocabulary"; add it, or set loss_parallel=False'
        )
    return whole


def _check_even(name: str, module: nn.Module, style: str | ParallelStyle, tp: int) -> None:
    sizes = {"column": "out_features", "row": "in_features", "vocabulary": "out_features"}
    if style == "embedding":
        sizes["embedding"] = "num_embeddings"
    attribute = sizes.get(style) if isinstance(style, str) else None
    if attribute is None:
        return
    size = getattr(module, attribute, None)
    if size is None:
        raise ValueError(
            f"plan gives {name!r} the style {style!r}, but it is a {type(module).__name__} without "
            f"`{attribute}`; give that style to nn.Linear (embedding: nn.Embedding) only"
        )
    if size % tp:
        raise ValueError(
            f"{name!r} has {attribute}={size}, which tp={tp} does not divide; set tp to a divisor, "
            f"make it {math.ceil(size / tp) * tp}, or pass plan=... without it"
        )


def spread_tensors(
    model: nn.Module, mesh: DeviceMesh, plan: Plan, *, sequence_parallel: bool, loss_parallel: bool
) -> None:
    """Cut a model's layers over a one-axis mesh, in place. Collective over: that mesh.

    Args:
        model: whole, equal on all ranks.
        mesh: the `tp` axis.
        plan: from `resolve_plan`.
        sequence_parallel: keep rows cut by token between the pairs of layers (arXiv 2205.05198).
        loss_parallel: leave the logits cut over the vocabulary.
    """
    tied = _tied(model)
    styles = {
        name: _style(style, loss_parallel=loss_parallel) if isinstance(style, str) else style
        for name, style in plan.items()
    }
    for prefix, decoder in decoders(model).items():
        if plan.get(f"{prefix}embedding") == "embedding":
            inside = _decoder_styles(
                decoder, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel
            )
            styles |= {f"{prefix}{name}".rstrip("."): style for name, style in inside.items()}
        if sequence_parallel:
            decoder.register_forward_pre_hook(_check_even_rows(mesh.size()), with_kwargs=True)
    root = styles.pop("", None)
    parallelize_module(model, mesh, styles)
    if root is not None:
        parallelize_module(model, mesh, root)
    _tie_again(model, tied)
    _keep_whole_gradients(model)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fused path in eval reads weights by itself


def _style(style: str, *, loss_parallel: bool) -> ParallelStyle:
    if style == "column":
        return ColwiseParallel()
    if style == "row":
        return RowwiseParallel()
    if style == "embedding":  # a row of an embedding's weight is a token
        return RowwiseParallel(input_layouts=Replicate())
    if style == "vocabulary":
        layout = Shard(-1) if loss_parallel else Replicate()
        return ColwiseParallel(output_layouts=layout, use_local_output=not loss_parallel)
    return SequenceParallel()


def _decoder_styles(
    model: DecoderLM,
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
) -> dict[str, ParallelStyle]:
    """Return the styles of a decoder that depend on each other: embedding, norms, output."""
    changed: dict[str, ParallelStyle] = {}
    stream = Shard(1) if sequence_parallel else Replicate()  # between the pairs of layers
    if model.head is None:  # the embedding is the output projection: give it a DTensor
        changed["norm"] = (
            _GatheringNorm()
            if sequence_parallel
            else PrepareModuleOutput(
                output_layouts=stream, desired_output_layouts=Replicate(), use_local_output=False
            )
        )
        if not loss_parallel:
            changed[""] = PrepareModuleOutput(
                output_layouts=Shard(-1), desired_output_layouts=Replicate()
            )
    if sequence_parallel:
        changed |= _sequence_styles(model, loss_parallel=loss_parallel)
    return changed


def _sequence_styles(model: DecoderLM, *, loss_parallel: bool) -> dict[str, ParallelStyle]:
    """Return the styles of a decoder whose rows are cut by token between its cut layers."""
    changed: dict[str, ParallelStyle] = {}
    stream = Shard(1)
    changed["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    if model.head is not None:
        changed["norm"] = SequenceParallel(use_local_output=True)
        changed["head"] = ColwiseParallel(
            input_layouts=stream,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        )
    for index in range(len(model.layers)):
        for part in ("attention", "ffn"):
            changed[f"layers.{index}.{part}_norm"] = SequenceParallel(use_local_output=True)
            others = (None, None, None) if part == "attention" else ()
            changed[f"layers.{index}.{part}"] = PrepareModuleInput(
                input_layouts=(stream, *others), desired_input_layouts=(Replicate(), *others)
            )
        changed[f"layers.{index}.attention.output"] = RowwiseParallel(output_layouts=stream)
        changed[f"layers.{index}.ffn.down"] = RowwiseParallel(output_layouts=stream)
    return changed


def _check_even_rows(tp: int) -> Callable[..., None]:
    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        num_tokens = (args[0] if args else kwargs["tokens"]).shape[1]
        if num_tokens % tp:
            raise ValueError(
                f"rows of {num_tokens} tokens cannot be cut evenly over tp={tp} ranks, as "
                f"sequence_parallel=True asks; pass rows of {math.ceil(num_tokens / tp) * tp} "
                "tokens, or leave sequence_parallel out"
            )

    return check


class _GatheringNorm(SequenceParallel):
    """A norm on rows cut by token that hands on whole rows, as DTensor."""

    def __init__(self) -> None:
        super().__init__(use_local_output=False)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _, __, out: out.redistribute(placements=[Replicate()]))
        return module


def _tied(model: nn.Module) -> list[tuple[str, str]]:
    """Return pairs of names that are one parameter, such as an embedding and its output."""
    first: dict[int, str] = {}
    pairs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            pairs.append((first[id(parameter)], name))
        first.setdefault(id(parameter), name)
    return pairs


def _tie_again(model: nn.Module, tied: list[tuple[str, str]]) -> None:
    for kept, name in tied:
        parameter = model.get_parameter(kept)
        owner, _, last = name.rpartition(".")
        if getattr(parameter, "placements", None) != getattr(
            model.get_parameter(name), "placements", None
        ):
            raise ValueError(
                f"`{kept}` and `{name}` are one parameter, but the plan cuts them differently; "
                "give both the same cut (embedding and vocabulary), or leave both out"
            )
        setattr(model.get_submodule(owner), last, parameter)


def _keep_whole_gradients(model: nn.Module) -> None:
    """Sum, as soon as it is there, the gradient of a whole weight that saw only part of the rows.

    torch leaves it as parts; the optimizer and FSDP want what the weight looks like.
    """
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter.register_hook(_as_the_weight(parameter))  # type: ignore[no-untyped-call]


def _as_the_weight(parameter: DTensor) -> Callable[[Tensor], Tensor]:
    placements = parameter.placements

    def settle(gradient: Tensor) -> Tensor:
        if isinstance(gradient, DTensor) and gradient.placements != placements:
            return gradient.redistribute(placements=placements)
        return gradient

    return settle
