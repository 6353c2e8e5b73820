"""Served models whose large layers are cut over several ranks, in plain tensors (ranks).

The cuts are those of training's tensor parallelism; DTensor is not used to compute, as it works
out anew how to cut every new number of tokens, which takes far longer than a step. A thread runs
these models while the main thread trains, so their process group is none of training's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from nbdist.errors import ServeError
from nbdist.serve.resident import bare_model, empty_model, fill, named_weights
from nbdist.serve.wire import own_group
from nbdist.train.models import DecoderLM
from nbdist.train.parallelize.record import applied_to
from nbdist.train.parallelize.tensor import resolve_plan

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["Cut", "cut_copy", "cut_empty"]

# dimension of a weight that a style cuts
_DIMENSIONS = {"column": 0, "row": 1, "embedding": 0, "vocabulary": 0}


@dataclass(frozen=True, slots=True)
class Cut:
    """How a model is cut.

    Attributes:
        group: of the ranks; used by this model only.
        dimensions: along which each cut weight is, by name.
    """

    group: ProcessGroup
    dimensions: dict[str, int]

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a weight, of the same memory."""
        if name not in self.dimensions:
            return whole
        number, place = self.group.size(), self.group.rank()
        return whole.chunk(number, self.dimensions[name])[place]


def cut_copy(model: nn.Module, ranks: list[int]) -> nn.Module:
    """Return an eval copy of `model` of which each of these ranks holds a part.

    Collective over: these ranks, and the axes that shard the model. Each weight is whole for the
    time it is cut.

    Args:
        model: as in `resident_copy`, of a kind whose plan is known.
        ranks: over which each large layer is cut.

    Raises:
        ServeError: a copy cannot be built from the model's config and weights.
        ValueError: the plan is not known, or a layer cannot be cut evenly.
    """
    empty, cut = cut_empty(model, ranks)
    made: dict[tuple[int, int | None], Tensor] = {}
    weights = {}
    for name, tensor in named_weights(bare_model(model)):
        key = id(tensor), cut.dimensions.get(name)
        if key not in made:
            made[key] = _part(tensor, name, cut)
        weights[name] = made[key]
    return fill(empty, weights)


@torch.no_grad()
def _part(tensor: Tensor, name: str, cut: Cut) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    # a slice would keep the whole alive
    return cut.part(name, whole.detach()).clone(memory_format=torch.contiguous_format)


def cut_empty(model: nn.Module, ranks: list[int]) -> tuple[nn.Module, Cut]:
    """Return a model of that kind without memory, cut over ranks. Collective over: these ranks.

    Raises:
        ServeError: a copy cannot be built from the model's config, or its plan has styles of
            torch's own.
        ValueError: the plan is not known, or a layer cannot be cut evenly.
    """
    empty: Any = empty_model(bare_model(model))
    applied = applied_to(model)
    given = applied.again.options["plan"] if applied and applied.again else None
    plan = resolve_plan(empty, given, len(ranks), sequence_parallel=False, loss_parallel=False)
    cut = Cut(own_group(ranks), {})
    for name, style in plan.items():
        if style != "sequence":
            _cut_module(empty, name, style, cut)
    if any(name.endswith("attention.key.weight") for name in cut.dimensions):
        empty.num_local_kv_heads = empty.config.num_kv_heads // len(ranks)
    if isinstance(empty, DecoderLM) and empty.head is None:  # the embedding is the head as well
        empty.register_forward_hook(lambda _, __, out: _joined(out, cut.group))
    return empty, cut


def _cut_module(model: nn.Module, name: str, style: Any, cut: Cut) -> None:
    module = model.get_submodule(name)
    if not isinstance(style, str) or type(module) not in (nn.Linear, nn.Embedding):
        raise ServeError(
            f"{name!r} is a {type(module).__name__} with the style {style!r}, which cannot be cut "
            "for serving; serve a whole copy, without tp"
        )
    dimension = _DIMENSIONS[style]
    cut.dimensions[f"{name}.weight"] = dimension
    if getattr(module, "bias", None) is not None and dimension == 0:
        cut.dimensions[f"{name}.bias"] = 0
    for leaf, weight in list(module.named_parameters(recurse=False)):
        part = nn.Parameter(cut.part(f"{name}.{leaf}", weight.detach()), requires_grad=False)
        setattr(module, leaf, part)
    if style != "column":
        kinds = {"row": _RowLinear, "embedding": _CutEmbedding, "vocabulary": _CutHead}
        model.set_submodule(name, kinds[style](module, cut.group))


class _Part(nn.Module):
    """A layer that has a part of its weight."""

    def __init__(self, layer: Any, group: ProcessGroup) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = getattr(layer, "bias", None)
        self._group = group


class _RowLinear(_Part):
    """A linear layer whose inputs are cut; each rank adds its part of the sum."""

    def forward(self, x: Tensor) -> Tensor:
        mapped = functional.linear(x, self.weight)
        dist.all_reduce(mapped, group=self._group)
        return mapped if self.bias is None else mapped + self.bias


class _CutHead(_Part):
    """A linear layer whose outputs are cut, and joined."""

    def forward(self, x: Tensor) -> Tensor:
        return _joined(functional.linear(x, self.weight, self.bias), self._group)


class _CutEmbedding(_Part):
    """An embedding of which each rank has some tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        num_own = len(self.weight)
        own = tokens - self._group.rank() * num_own
        is_other = (own < 0) | (own >= num_own)
        found = functional.embedding(own.clamp(0, num_own - 1), self.weight)
        found = found.masked_fill(is_other[..., None], 0.0)
        dist.all_reduce(found, group=self._group)
        return found


def _joined(part: Tensor, group: ProcessGroup) -> Tensor:
    """Return the parts of all ranks side by side along the last dimension."""
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
