"""Asynchronous training: one rank holds the weights, the others push gradients to it (ranks).

Dean et al. 2012, "Large scale distributed deep networks" (Downpour SGD), with one server and one
step between two pulls. Nobody waits for another worker, so a gradient is taken at weights that the
server has left behind; how many updates ago is its staleness, and it is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from nbdist.train.metrics import shown_figure
from nbdist.train.optim import build_optimizer
from nbdist.train.parallelize.checks import agree, check_materialized
from nbdist.train.rng import seed_rng

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor, nn

    from nbdist.train.config import TrainConfig
    from nbdist.train.data import TrainData

__all__ = ["AsyncHistory", "AsyncUpdate", "train_asynchronously"]

_SERVER = 0
_NOTES = 2  # of a push: loss and the version that was pulled; of an answer: version, go on


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncUpdate:
    """One update of the server's weights.

    Attributes:
        worker: rank that computed the gradient.
        staleness: updates by others between its pull and its push.
        loss: mean over the worker's rows, at the weights that it had pulled.
    """

    worker: int
    staleness: int
    loss: float


@dataclass(slots=True)
class AsyncHistory:
    """The updates in the order in which the server took them."""

    updates: list[AsyncUpdate] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The loss of every update."""
        return [update.loss for update in self.updates]

    @property
    def staleness(self) -> dict[int, int]:
        """Number of updates by staleness, the freshest first."""
        seen = [update.staleness for update in self.updates]
        return {value: seen.count(value) for value in sorted(set(seen))}

    def __repr__(self) -> str:
        if not self.updates:
            return "AsyncHistory(no updates)"
        losses, seen = self.losses, [update.staleness for update in self.updates]
        return (
            f"AsyncHistory({len(seen)} updates, loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
            f"staleness mean {sum(seen) / len(seen):.2f}, most {max(seen)})"
        )

    def plot(self) -> Figure:
        """Return a figure of loss over updates and of staleness; a notebook shows it.

        Raises:
            ImportError: matplotlib is not installed; the text names the command.
        """
        figure = shown_figure("AsyncHistory.plot", figsize=(8, 3.5))
        left, right = figure.subplots(1, 2)
        left.plot(range(1, len(self.updates) + 1), self.losses)
        left.set_xlabel("update")
        left.set_ylabel("loss")
        right.bar(list(self.staleness), list(self.staleness.values()))
        right.set_xlabel("staleness")
        right.set_ylabel("updates")
        return figure


def train_asynchronously(model: nn.Module, data: TrainData, config: TrainConfig) -> AsyncHistory:
    """Train a whole model without steps in common. Collective over: the default group.

    Rank 0 is the server, the others are workers. A worker's batch is its share of
    `global_batch_size` over the workers; `num_steps` counts updates, one batch each, and the
    learning rate follows them. A worker clips its own gradient. `accumulation_steps`, evaluation,
    checkpoints, healing and float16 are not for this way. All ranks end with the server's weights.

    Args:
        model: equally built on every rank; not spread.
        data: equal on every rank.
        config: how to train.

    Returns:
        The history, on all ranks.

    Raises:
        ValueError: one rank alone, or an option that this way does not have.
    """
    _check(config)
    check_materialized(model, may_be_empty=False)
    agree(model)
    seed_rng(config.seed, 0, dist.get_rank())
    model.train()
    history = [AsyncHistory()]
    if dist.get_rank() == _SERVER:
        _serve(model, config, history[0].updates)
    else:
        _work(model, data, config)
    dist.broadcast_object_list(history, _SERVER)
    return history[0]


def _check(config: TrainConfig) -> None:
    if dist.get_world_size() < 2:
        raise ValueError(
            "asynchronous training was asked for on 1 rank: rank 0 is the server and nobody "
            "would work; start 2 ranks or more"
        )
    plain = {"accumulation_steps": 1, "eval_every": None, "checkpoint": None, "on_failure": "stop"}
    plain |= {"autocast_dtype": None, "detect_anomaly": False}
    wrong = {name: getattr(config, name) for name in plain if getattr(config, name) != plain[name]}
    if wrong:
        named = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        raise ValueError(
            f"asynchronous training was asked for with {named}, which it does not have; leave "
            "these out, or use Trainer"
        )


def _serve(model: nn.Module, config: TrainConfig, updates: list[AsyncUpdate]) -> None:
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = build_optimizer(model, config)
    size = sum(p.numel() for p in weights)
    push = weights[0].new_empty(size + _NOTES)
    working = dist.get_world_size() - 1
    while working:
        worker = dist.recv(push)  # from whoever is first
        gradient, (loss, pulled) = push[:size], push[size:].tolist()
        version = len(updates)
        if version < config.num_steps:
            _set_gradients(weights, gradient)
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate_at(version)
            optimizer.step()
            staleness = version - int(pulled)
            updates.append(AsyncUpdate(worker=worker, staleness=staleness, loss=loss))
        # gradients that are on their way when the last update is done are dropped
        goes_on = len(updates) < config.num_steps
        working -= not goes_on
        dist.send(_flat(weights, [len(updates), goes_on]), worker)


def _work(model: nn.Module, data: TrainData, config: TrainConfig) -> None:
    weights = [p for p in model.parameters() if p.requires_grad]
    size = sum(p.numel() for p in weights)
    rows = data.for_rank(
        global_batch_size=config.global_batch_size,
        rank=dist.get_rank() - 1,
        world_size=dist.get_world_size() - 1,
    )
    answer = weights[0].new_empty(size + _NOTES)
    pulled, goes_on, step = 0.0, 1.0, 0
    while goes_on:
        inputs, targets = (part.to(weights[0].device) for part in rows.batch(step))
        model.zero_grad()
        loss = config.loss_fn(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(weights, config.clip_norm)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
        dist.send(_flat(gradients, [float(loss), pulled]), _SERVER)
        dist.recv(answer, _SERVER)
        with torch.no_grad():
            for p, new in zip(weights, _pieces(weights, answer[:size]), strict=True):
                p.copy_(new)
        pulled, goes_on = answer[size:].tolist()
        step += 1


def _set_gradients(weights: list[nn.Parameter], flat: Tensor) -> None:
    for p, gradient in zip(weights, _pieces(weights, flat), strict=True):
        p.grad = gradient


def _pieces(weights: list[nn.Parameter], flat: Tensor) -> list[Tensor]:
    parts = torch.split(flat, [p.numel() for p in weights])
    return [part.view_as(p) for part, p in zip(parts, weights, strict=True)]


def _flat(tensors: list[Tensor] | list[nn.Parameter], notes: list[float]) -> Tensor:
    """Return tensors and notes as one message; float32 holds whole numbers up to 2**24."""
    flat = [t.detach().flatten() for t in tensors]
    return torch.cat([*flat, flat[0].new_tensor(notes)])
