"""Ring attention: keys and values travel around the ranks, queries stay (ranks).

arXiv 2310.01889, with plain matrix products, so it runs in any dtype and on any backend. A rank
holds T tokens of a row in order; the causal mask leaves the first ranks less to do than the last.
Shapes: B rows, H heads, T tokens of this rank, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ring_attention"]


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    *,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Return attention over the tokens of all ranks, (B, H, T, D). Collective over: `group`.

    Args:
        query: (B, H, T, D).
        key: (B, H, T, D).
        value: (B, H, T, D).
        group: in the order of the tokens.
        is_causal: a token sees itself and those before it.
        scale: of the scores.
    """
    attended: Tensor = _Ring.apply(query, key, value, group, is_causal, scale)  # type: ignore[no-untyped-call]
    return attended


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take positions only
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: dist.ProcessGroup,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        travelling = torch.stack((key, value))
        out = torch.zeros_like(query)
        lse = query.new_full((*query.shape[:-1], 1), -torch.inf)  # log of the sum of exponentials
        for step in range(size):
            source = (rank - step) % size
            arriving, sent = _pass_on(travelling, group) if step < size - 1 else (travelling, [])
            if source <= rank or not is_causal:
                scores = _scores(query, travelling[0], scale, masked=is_causal and source == rank)
                part_lse = scores.logsumexp(-1, keepdim=True)
                both = torch.logaddexp(lse, part_lse)
                part = (scores - part_lse).exp() @ travelling[1]
                out = out * (lse - both).exp() + part * (part_lse - both).exp()
                lse = both
            for work in sent:
                work.wait()
            travelling = arriving
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.group, ctx.is_causal, ctx.scale = group, is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        # keys, values and the sums of their gradients, which are home again after a whole round
        travelling = torch.stack((key, value, torch.zeros_like(key), torch.zeros_like(value)))
        grad_query = torch.zeros_like(query)
        delta = (grad * out).sum(-1, keepdim=True)
        for step in range(size):
            source = (rank - step) % size
            if source <= rank or not ctx.is_causal:
                own = ctx.is_causal and source == rank
                weights = (_scores(query, travelling[0], ctx.scale, masked=own) - lse).exp()
                grad_scores = weights * (grad @ travelling[1].mT - delta) * ctx.scale
                grad_query += grad_scores @ travelling[0]
                travelling[2] += grad_scores.mT @ query
                travelling[3] += weights.mT @ grad
            arriving, sent = _pass_on(travelling, ctx.group)
            for work in sent:
                work.wait()
            travelling = arriving
        return grad_query, travelling[2], travelling[3], None, None, None


def _scores(query: Tensor, key: Tensor, scale: float, *, masked: bool) -> Tensor:
    scores = query @ key.mT * scale
    if not masked:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -torch.inf)


def _pass_on(tensor: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    """Send to the next rank and receive from the one before; valid once all is waited for."""
    ranks = dist.get_process_group_ranks(group)
    rank = dist.get_rank(group)
    arriving = torch.empty_like(tensor)
    to, source = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, to, group),
            dist.P2POp(dist.irecv, arriving, source, group),
        ]
    )
    return arriving, works
