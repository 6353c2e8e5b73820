"""The same training as `train_overhead.py` measures, written by hand for torchrun (ranks).

What a reader of the FSDP2 tutorial would write: no nbdist trainer, only its model and its data.
Prints one JSON line on rank 0: the tokens per second of each timed step.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from nbdist.train.data import TextData, shakespeare
from nbdist.train.models import DecoderConfig, DecoderLM

num_steps, global_batch_size = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)

data = TextData(shakespeare()).for_rank(
    global_batch_size=global_batch_size, rank=rank, world_size=world_size
)
model = DecoderLM(DecoderConfig.tiny(data.data.vocab_size))
mesh = init_device_mesh("cpu", (world_size,))
for block in model.layers:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))

seconds = []
for step in range(num_steps):
    started = time.perf_counter()
    inputs, targets = data.batch(step)
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    shown = loss.detach()
    dist.all_reduce(shown)  # the loss of the whole batch, for the log
    if rank == 0:
        print(f"step {step}: loss {shown.item() / world_size:.3f}", file=sys.stderr)
    seconds.append(time.perf_counter() - started)

if rank == 0:
    print(json.dumps([global_batch_size * 128 / taken for taken in seconds]), flush=True)
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's threads can abort a process that ends by Python's finalization
