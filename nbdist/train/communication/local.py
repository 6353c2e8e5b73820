"""Local SGD and DiLoCo: ranks train alone and meet every H steps (ranks)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["LocalLink", "LocalSGD"]


@dataclass(frozen=True, slots=True)
class LocalLink:
    """What `parallelize` leaves for the optimizer of a model whose ranks train alone.

    Attributes:
        group: the data-parallel ranks.
        every: steps between two meetings.
        outer_learning_rate: of the step on the mean of the ranks' ways.
        outer_momentum: of that step.
    """

    group: dist.ProcessGroup
    every: int
    outer_learning_rate: float
    outer_momentum: float

    def attach(self, optimizer: torch.optim.Optimizer) -> LocalSGD:
        """Let an optimizer's steps be local. Collective over: nothing."""
        return LocalSGD(
            optimizer,
            every=self.every,
            outer_learning_rate=self.outer_learning_rate,
            outer_momentum=self.outer_momentum,
            group=self.group,
        )


class LocalSGD:
    """Makes an optimizer's steps local: after every H of them the ranks meet (DiLoCo).

    Douillard et al., arXiv 2311.08105. A rank's way is the difference between the weights of the
    last meeting and its own. The mean of all ways is the gradient of one step of SGD with Nesterov
    momentum, taken from the weights of the last meeting. With an outer rate of 1 and no momentum
    it is local SGD (Stich, arXiv 1805.09767): the ranks average their weights. The inner optimizer
    keeps its own state on each rank. Buffers are not averaged.

    Every `every`-th `optimizer.step()` is collective over `group`: one all_reduce of all weights.

    Args:
        optimizer: over whole weights that are equal on all ranks now, of one dtype and device.
        every: H, steps between two meetings.
        outer_learning_rate: of the outer step.
        outer_momentum: of the outer step.
        group: the default group when None.

    Attributes:
        steps: inner steps done.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.9,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if every < 1 or not outer_learning_rate > 0 or not 0 <= outer_momentum < 1:
            raise ValueError(
                f"local SGD was asked for with every={every}, outer_learning_rate="
                f"{outer_learning_rate}, outer_momentum={outer_momentum}; set every >= 1, "
                "outer_learning_rate > 0 and 0 <= outer_momentum < 1"
            )
        self.every = every
        self.steps = 0
        self._group = group
        self._weights = [p for given in optimizer.param_groups for p in given["params"]]
        # the weights of the last meeting, equal on all ranks; the outer step is taken on them
        self._met = [p.detach().clone() for p in self._weights]
        self._outer = torch.optim.SGD(
            self._met, lr=outer_learning_rate, momentum=outer_momentum, nesterov=outer_momentum > 0
        )
        optimizer.register_step_post_hook(self._step_done)

    def _step_done(self, *_: object) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            self._meet()

    @torch.no_grad()
    def _meet(self) -> None:
        ways = [met - mine for met, mine in zip(self._met, self._weights, strict=True)]
        mean = torch.cat([way.flatten() for way in ways])
        dist.all_reduce(mean, group=self._group)
        mean /= dist.get_world_size(self._group)
        pieces = torch.split(mean, [way.numel() for way in ways])
        for met, piece in zip(self._met, pieces, strict=True):
            met.grad = piece.view_as(met)
        self._outer.step()
        self._outer.zero_grad()
        for met, mine in zip(self._met, self._weights, strict=True):
            mine.copy_(met)

    def state_dict(self) -> dict[str, Any]:
        """Return the outer state, equal on all ranks; weights and inner state belong to a rank."""
        return {"steps": self.steps, "met": self._met, "outer": self._outer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` returned; the model's weights are loaded by the caller."""
        self.steps = state["steps"]
        for met, loaded in zip(self._met, state["met"], strict=True):
            met.copy_(loaded)
        self._outer.load_state_dict(state["outer"])
