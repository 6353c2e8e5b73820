"""Where a model is cut into pipeline stages (ranks).

A model is a row of units that run one after another: what stands before its blocks, the blocks,
what stands after them. A stage is a run of units; the units it does not own hand through what
they get, so names of weights stay those of the whole model.
"""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Passed", "balance", "costs_of", "keep_units", "stage_module", "units_of"]


class Passed(nn.Module):
    """Stands where another rank's unit was: hands through its first argument."""

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        """Return `x`."""
        return x


def units_of(model: nn.Module) -> list[str]:
    """Return the names of a model's units, in the order in which they run.

    That order is the one in which they were given to the model: an embedding, a `ModuleList` or
    `Sequential` of blocks, a norm, a head. Modules without weights run on every stage.

    Raises:
        ValueError: no list of blocks, weights outside the units, or a weight in two units.
    """
    path = _path_to_blocks(model)
    before: list[str] = []
    after: list[str] = []
    prefix = ""
    module = model
    for step in path:
        names = [n for n, child in module.named_children() if _has_weights(child)]
        place = names.index(step)
        before += [prefix + name for name in names[:place]]
        after = [prefix + name for name in names[place + 1 :]] + after
        module, prefix = module.get_submodule(step), f"{prefix}{step}."
    # `named_children` would leave out a block that stands there twice
    units = [*before, *(prefix + name for name in module._modules), *after]
    _check_weights(model, units)
    return units


def _path_to_blocks(model: nn.Module) -> list[str]:
    if isinstance(model, nn.Sequential):
        return []
    lists = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
    }
    if not lists:
        raise ValueError(
            f"pp > 1 was asked for {type(model).__name__}, which has no nn.ModuleList or "
            "nn.Sequential of blocks to cut; put its layers into one"
        )
    largest: str = max(lists, key=lambda name: lists[name])  # the first of equals: the outer
    return largest.split(".")


def _check_weights(model: nn.Module, units: list[str]) -> None:
    owner: dict[int, str] = {}
    for unit in units:
        for name, parameter in model.get_submodule(unit).named_parameters():
            other = owner.setdefault(id(parameter), unit)
            if other != unit:
                raise ValueError(
                    f"`{unit}.{name}` is also a weight of `{other}`, and pp > 1 may put them on "
                    "different ranks; build the model with separate weights "
                    "(tie_embeddings=False, tie_word_embeddings=False)"
                )
    loose = [name for name, p in model.named_parameters() if id(p) not in owner]
    if loose:
        raise ValueError(
            f"`{loose[0]}` lies outside the units that pp > 1 cuts ({', '.join(units[:3])}, ...); "
            "put it into a module of its own, before or after the blocks"
        )
    if isinstance(getattr(model, "embedding", None), nn.Embedding) and (
        getattr(model, "head", model) is None
    ):
        raise ValueError(
            "pp > 1 was asked for a model whose embedding is its output projection too: first and "
            "last stage would need it; build it with DecoderConfig(tie_embeddings=False)"
        )


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def costs_of(model: nn.Module, units: Sequence[str], sample: Tensor | None) -> list[float]:
    """Return what each unit costs: its seconds for `sample` on rank 0, else its weights.

    Collective over: the default group, when there is a sample.
    """
    modules = [model.get_submodule(unit) for unit in units]
    if sample is None:
        return [float(sum(p.numel() for p in module.parameters())) for module in modules]
    costs = [0.0] * len(units)
    if dist.get_rank() == 0:
        _measure(model, modules, sample, costs)
    dist.broadcast_object_list(costs, src=0)
    return costs


def _measure(
    model: nn.Module, modules: list[nn.Module], sample: Tensor, costs: list[float]
) -> None:
    """Fill in the least seconds of each unit's forward; backward costs a fixed multiple of it."""
    started: dict[int, float] = {}
    hooks = []

    def wait() -> float:
        if sample.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    for index, module in enumerate(modules):

        def begin(*_: Any, index: int = index) -> None:
            started[index] = wait()

        def end(*_: Any, index: int = index) -> None:
            seconds = wait() - started[index]
            costs[index] = min(costs[index], seconds) if costs[index] else seconds

        hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        with torch.no_grad():
            for _ in range(3):  # the first one warms up
                model(sample)
    finally:
        for hook in hooks:
            hook.remove()


def balance(costs: Sequence[float], num_stages: int) -> list[int]:
    """Return the index of the first unit of every stage, so that the dearest stage is cheapest.

    Raises:
        ValueError: fewer units than stages.
    """
    if len(costs) < num_stages:
        raise ValueError(
            f"{num_stages} pipeline stages were asked for, but the model has {len(costs)} units; "
            f"set pp * stages_per_rank <= {len(costs)}"
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n][i]: cost of the dearest of n stages over the first i units, and where its last begins
    best = [[(sums[i], 0) for i in range(len(sums))]]
    for stage in range(1, num_stages):
        row = [(float("inf"), 0)] * len(sums)
        for i in range(stage + 1, len(sums)):
            row[i] = min((max(best[-1][j][0], sums[i] - sums[j]), j) for j in range(stage, i))
        best.append(row)
    starts, end = [], len(costs)
    for stage in reversed(range(num_stages)):
        end = best[stage][end][1]
        starts.append(end)
    return starts[::-1]


def stage_module(model: nn.Module, units: Sequence[str], owned: Iterable[str]) -> nn.Module:
    """Return a module that runs the owned units only; it shares them with `model`."""
    return _cut(model, "", set(units), set(owned))


def _cut(module: nn.Module, name: str, units: set[str], owned: set[str]) -> nn.Module:
    if name in units:
        return module if name in owned else Passed()
    prefix = f"{name}." if name else ""
    if not any(unit.startswith(prefix) for unit in units):
        return module
    clone = copy.copy(module)
    for key, value in vars(module).items():  # hooks of a stage must not run on the others
        if isinstance(value, dict):
            clone.__dict__[key] = copy.copy(value)
    clone._modules = {
        child: _cut(kept, prefix + child, units, owned) if kept is not None else None
        for child, kept in module._modules.items()
    }
    return clone


def keep_units(model: nn.Module, units: Sequence[str], owned: set[str]) -> None:
    """Drop the units of other ranks from a model, in place: their memory is freed."""
    for unit in units:
        if unit not in owned:
            parent, _, last = unit.rpartition(".")
            model.get_submodule(parent)._modules[last] = Passed()
