"""A pipeline by hand, for torchrun: 1F1B over two halves of the layers (ranks)."""

from __future__ import annotations

import loop
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

NUM_MICRO_BATCHES = 4


class Part(nn.Module):
    """The layers of one rank."""

    def __init__(self, whole: nn.Module, rank: int, world_size: int) -> None:
        super().__init__()
        per_rank = len(whole.layers) // world_size
        self.embedding = whole.embedding if rank == 0 else None
        self.layers = whole.layers[rank * per_rank : (rank + 1) * per_rank]
        is_last = rank == world_size - 1
        self.norm, self.head = (whole.norm, whole.head) if is_last else (None, None)
        cos, sin = whole._rotary(torch.arange(loop.CONTEXT_LENGTH)[None], torch.float32)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens or (B, T, C) to (B, T, C) or logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin, None)
        return x if self.norm is None else self.head(self.norm(x))


whole, data = loop.start(rows_differ=False, tied=False)
rank, world_size = dist.get_rank(), dist.get_world_size()
part = Part(whole, rank, world_size)
stage = PipelineStage(part, rank, world_size, torch.device("cpu"))
schedule = Schedule1F1B(
    stage,
    NUM_MICRO_BATCHES,
    loss_fn=lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten()),
)


def forward_backward(inputs: Tensor, targets: Tensor) -> Tensor:
    """Run all micro-batches; the loss is the last rank's."""
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets, losses=losses)
    return torch.stack(losses).mean().detach() if losses else torch.zeros(())


def clip() -> None:
    """Clip by the norm over all stages."""
    grads = [p.grad for p in part.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    squared = norm.square()
    dist.all_reduce(squared)
    torch.nn.utils.clip_grads_with_norm_(part.parameters(), 1.0, squared.sqrt())


loop.run(part, data, forward_backward, clip)
