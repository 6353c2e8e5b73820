"""What one checkpoint holds of a rank, collected between two steps (ranks)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

from nbdist.train.manifest import Manifest
from nbdist.train.rng import rng_state

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Snapshot", "take"]


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """All that one checkpoint will hold of this rank, from `take`, for `write`.

    Attributes:
        final: where the checkpoint will be.
        state: of the model and the optimizer.
        steady: names of weights that nothing but the optimizer's step changes.
        rng: random states of this rank.
        manifest: without its files.
        tokenizer_json: for serving; None for none.
        keep_last: checkpoints kept; None keeps all.
        keep_every: checkpoints of these steps are kept for good.
    """

    final: Path
    state: dict[str, Any]
    steady: frozenset[str]
    rng: dict[str, Any]
    manifest: Manifest
    tokenizer_json: str | None
    keep_last: int | None
    keep_every: int | None

    def changing(self) -> dict[str, Any]:
        """Return the part of the state that a forward or the trainer's settings may change."""
        model = {k: v for k, v in self.state["model"].items() if k not in self.steady}
        optimizer = {k: v for k, v in self.state["optimizer"].items() if k != "state"}
        return {"model": model, "optimizer": optimizer}

    def steady_part(self) -> dict[str, Any]:
        """Return the other part: nothing but the optimizer's step changes it."""
        model = {k: v for k, v in self.state["model"].items() if k in self.steady}
        return {"model": model, "optimizer": {"state": self.state["optimizer"]["state"]}}

    def replace_state(self, *parts: dict[str, Any]) -> None:
        """Take copies of both parts for the state."""
        self.state = {
            name: {k: v for part in parts for k, v in part[name].items()}
            for name in ("model", "optimizer")
        }


def take(
    directory: str | Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: dict[str, int],
    loss: float | None = None,
    loss_scale: tuple[float, int] | None = None,
    config: dict[str, Any] | None = None,
    tokenizer_json: str | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Snapshot:
    """Collect what a checkpoint holds. Collective over: the default group.

    Holds the weights and the optimizer's state, by reference; each rank's random states; the
    tokenizer.
    """
    state, optimizer_state = get_state_dict(model, optimizer)
    _join_groups(optimizer_state)
    return Snapshot(
        final=Path(directory) / f"step-{step:08d}",
        state={"model": state, "optimizer": optimizer_state},
        steady=_steady_names(state, optimizer),
        rng=rng_state(),
        manifest=Manifest(
            step=step,
            world_size=dist.get_world_size(),
            mesh=mesh,
            torch_version=str(torch.__version__),
            loss=loss,
            seconds=time.time(),
            loss_scale=loss_scale,
            config=config or {},
        ),
        tokenizer_json=tokenizer_json,
        keep_last=keep_last,
        keep_every=keep_every,
    )


def _steady_names(weights: dict[str, Any], optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Return which weights are the optimizer's; frozen ones may be some forward's own (MoCo)."""
    trained = {
        _memory(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    } - {None}
    return frozenset(name for name, value in weights.items() if _memory(value) in trained)


def _memory(value: object) -> int | None:
    """Return where the data of a tensor lie on this rank; None for what has none."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return (local.untyped_storage().data_ptr() or None) if isinstance(local, Tensor) else None


def _join_groups(optimizer_state: dict[str, Any]) -> None:
    """Join the groups of ranks that hold different weights (pipeline), by their settings."""
    everyone: list[list[dict[str, Any]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, optimizer_state["param_groups"])
    joined: dict[str, dict[str, Any]] = {}
    for group in (group for theirs in everyone for group in theirs):
        settings = repr(sorted((key, value) for key, value in group.items() if key != "params"))
        known = joined.setdefault(settings, group | {"params": []})
        known["params"] += [name for name in group["params"] if name not in known["params"]]
    optimizer_state["param_groups"] = list(joined.values())
