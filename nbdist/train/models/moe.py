"""A mixture of experts: top-k routing, capacity, load balance; experts on one rank or many (ranks).

With one choice a token it is Switch (arXiv 2101.03961), with two GShard (arXiv 2006.16668).
Capacity and balance are counted row by row, so they do not depend on how rows are dealt to ranks.
Shapes: B rows, T tokens, C width, E experts, K choices, N kept pairs of token and expert.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.tensor import DTensor
from torch.nn import functional

__all__ = ["Experts", "MixtureOfExperts", "auxiliary_loss"]


class Experts(nn.Module):
    """SwiGLU experts. After `parallelize` on a mesh with `ep`, a rank holds some of them."""

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.up = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.group: dist.ProcessGroup | None = None  # ranks of `ep`
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map (N, C), sorted by expert, to (N, C); counts (E,) are the rows of each expert.

        Collective over: `group`, if there is one; ranks may bring different numbers of rows.
        """
        if self.group is None:
            return self._compute(x, counts.tolist())
        ranks = dist.get_world_size(self.group)
        arriving = all_to_all_single(counts, None, None, self.group).view(ranks, -1)
        sent = counts.view(ranks, -1).sum(1).tolist()
        received = arriving.sum(1).tolist()
        tokens = all_to_all_single_autograd(x, received, sent, self.group)
        # they come sorted by sender, then by expert
        local = torch.arange(arriving.shape[1], device=x.device).repeat(ranks)
        order = local.repeat_interleave(arriving.flatten()).argsort(stable=True)
        computed = self._compute(tokens[order], arriving.sum(0).tolist())
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        returned: Tensor = all_to_all_single_autograd(computed[back], sent, received, self.group)
        return returned

    def _compute(self, x: Tensor, counts: list[int]) -> Tensor:
        gates, ups, downs = (self._local(p) for p in (self.gate, self.up, self.down))
        rows = torch.split(x, counts)
        # experts without a row too: their gradient is 0, not missing
        parts = [
            (functional.silu(part @ gate) * (part @ up)) @ down
            for part, gate, up, down in zip(rows, gates, ups, downs, strict=True)
        ]
        return torch.cat(parts)

    def _local(self, parameter: Tensor) -> Tensor:
        whole = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if self.group is None:
            return whole
        # an expert sees the rows of all `ep` ranks, whose gradients are averaged elsewhere
        scale = 1 / dist.get_world_size(self.group)
        scaled: Tensor = _ScaledBackward.apply(whole, scale)  # type: ignore[no-untyped-call]
        return scaled


class _ScaledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


class MixtureOfExperts(nn.Module):
    """Sends each token to its best experts and adds up what they return.

    Args:
        width: C.
        hidden: width inside an expert.
        num_experts: E.
        experts_per_token: K.
        capacity_factor: in training, an expert takes at most that many times its even share of a
            row's pairs; pairs beyond it are dropped, first choices last. None drops nothing.
        balance_weight: of the load-balance loss in the training loss.

    Attributes:
        balance_loss: of the last forward; 1 when every expert gets its share.
        load: pairs that each expert got in the last forward on this rank, (E,).
        num_dropped: pairs that were dropped in it.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        *,
        experts_per_token: int = 2,
        capacity_factor: float | None = None,
        balance_weight: float = 0.01,
    ) -> None:
        super().__init__()
        if not 1 <= experts_per_token <= num_experts:
            raise ValueError(
                f"experts_per_token={experts_per_token} of num_experts={num_experts} was asked "
                f"for; set 1 <= experts_per_token <= {num_experts}"
            )
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.capacity_factor = capacity_factor
        self.balance_weight = balance_weight
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = Experts(num_experts, width, hidden)
        self.balance_loss: Tensor | None = None
        self.load: Tensor | None = None
        self.num_dropped: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C). Collective over: the ranks of `ep`."""
        scores = functional.softmax(self.router(x), dim=-1)  # (B, T, E)
        weights, chosen = scores.topk(self.experts_per_token, dim=-1)  # (B, T, K)
        if self.experts_per_token > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        picked = functional.one_hot(chosen, self.num_experts)  # (B, T, K, E)
        kept = self._within_capacity(picked)
        share = picked.sum(2).to(scores.dtype).mean(1) / self.experts_per_token  # (B, E)
        self.balance_loss = self.num_experts * (share * scores.mean(1)).sum(-1).mean()
        self.num_dropped = (~kept).sum()
        tokens = torch.arange(kept[..., 0].numel(), device=x.device).view(*kept.shape[:2], 1)
        tokens = tokens.expand_as(kept)[kept]
        order = chosen[kept].argsort(stable=True)
        self.load = torch.bincount(chosen[kept], minlength=self.num_experts)
        tokens = tokens[order]
        returned = self.experts(x.flatten(0, 1)[tokens], self.load)
        returned = returned * weights[kept][order][:, None].to(returned.dtype)
        return torch.zeros_like(x.flatten(0, 1)).index_add(0, tokens, returned).view_as(x)

    def _within_capacity(self, picked: Tensor) -> Tensor:
        """Return which choices find room, (B, T, K) bool; first choices of a row go first."""
        rows, num_tokens, choices, _ = picked.shape
        if self.capacity_factor is None or not self.training:
            return picked.new_ones(rows, num_tokens, choices, dtype=torch.bool)
        room = math.ceil(self.capacity_factor * num_tokens * choices / self.num_experts)
        queue = picked.transpose(1, 2).flatten(1, 2)  # (B, K * T, E)
        place = ((queue.cumsum(1) - 1) * queue).sum(-1)
        return (place < room).view(rows, choices, num_tokens).transpose(1, 2)


def auxiliary_loss(model: nn.Module) -> Tensor | None:
    """Return the weighted load-balance losses of the last forward; None without experts."""
    losses = [
        module.balance_weight * module.balance_loss
        for module in model.modules()
        if isinstance(module, MixtureOfExperts) and module.balance_loss is not None
    ]
    return torch.stack(losses).sum() if losses else None
