"""Tensor parallelism by hand, for torchrun: columns, then rows, of every block (ranks)."""

import loop
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

model, data = loop.start(rows_differ=False, tied=False)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
plan = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
for index in range(len(model.layers)):
    at = f"layers.{index}"
    for name in ("query", "key", "value"):
        plan[f"{at}.attention.{name}"] = ColwiseParallel()
    plan[f"{at}.attention.output"] = RowwiseParallel()
    plan[f"{at}.ffn.gate"] = plan[f"{at}.ffn.up"] = ColwiseParallel()
    plan[f"{at}.ffn.down"] = RowwiseParallel()
parallelize_module(model, mesh, plan)


def clip() -> None:
    """Clip by the norm of all gradients; those of cut weights and of whole ones apart."""
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    norms = [torch.nn.utils.get_total_norm([p.grad for p in part]) for part in (cut, whole)]
    norm = torch.stack((norms[0].full_tensor(), norms[1])).norm()
    for part in (cut, whole):
        torch.nn.utils.clip_grads_with_norm_(part, 1.0, norm)


loop.run(model, data, clip=clip)
