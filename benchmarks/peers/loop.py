"""What the hand-written scripts share: the process group, the data, the timed loop (ranks).

Each script is what a reader of torch's tutorials would write: no nbdist trainer, only its model and
its data. Prints one JSON line on the last rank: the tokens per second of each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from nbdist.train.data import TextData, shakespeare
from nbdist.train.models import DecoderConfig, DecoderLM

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

CONTEXT_LENGTH = 128


def start(*, rows_differ: bool, tied: bool = True) -> tuple[nn.Module, Any]:
    """Join the group; return the whole model and this rank's rows."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if rows_differ else (0, 1)
    data = TextData(shakespeare()).for_rank(
        global_batch_size=int(sys.argv[2]), rank=rank, world_size=world_size
    )
    config = DecoderConfig(vocab_size=data.data.vocab_size, tie_embeddings=tied)
    return DecoderLM(config), data


def run(
    model: nn.Module,
    data: Any,
    forward_backward: Callable[[Tensor, Tensor], Tensor] | None = None,
    clip: Callable[[], object] | None = None,
) -> None:
    """Train for the steps of the command line and print how fast they were."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))

    def plain(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.detach()

    compute = forward_backward or plain
    num_steps, global_batch_size = int(sys.argv[1]), int(sys.argv[2])
    seconds = []
    for step in range(num_steps):
        started = time.perf_counter()
        inputs, targets = data.batch(step)
        shown = compute(inputs, targets)
        if clip is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            clip()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(shown)  # the loss of the whole batch, for the log
        if dist.get_rank() == 0:
            print(f"step {step}: loss {shown.item():.3f}", file=sys.stderr)
        seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        speeds = [global_batch_size * CONTEXT_LENGTH / taken for taken in seconds]
        print(json.dumps(speeds), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort a process that ends by Python's finalization
