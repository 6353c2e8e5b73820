"""FSDP2 by hand, for torchrun: one group of weights a block (ranks)."""

import loop
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

model, data = loop.start(rows_differ=True)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for block in model.layers:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
loop.run(model, data)
