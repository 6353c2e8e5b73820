"""What a model needs on each rank, and which mesh to take (ranks).

ZeRO's sums (arXiv 1910.02054, section 3): weights, gradients and two AdamW moments, each of the
size of the weights. Activations are counted, not estimated: what autograd would keep of one pass
on the meta device, which computes nothing and takes no memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from nbdist.train.mesh import Axis, MeshConfig
from nbdist.train.parallelize.data import blocks
from nbdist.train.parallelize.tensor import resolve_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.hooks import RemovableHandle

    from nbdist.train.parallelize.record import Strategy

__all__ = [
    "ChosenMesh",
    "MemoryPlan",
    "activation_bytes",
    "choose_mesh",
    "free_bytes",
    "plan_memory",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenMesh(MeshConfig):
    """A `MeshConfig` that tells why it was chosen: print it, or end a cell with it.

    Attributes:
        why: the meshes looked at, a line each.
    """

    why: str = ""

    def __str__(self) -> str:
        """Return `why`."""
        return self.why

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.why)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on each rank at the peak of a step; the allocator's rest comes on top.

    Attributes:
        weight_bytes: of the rank's shard, and of what is gathered beside it.
        gradient_bytes: of the rank's gradients before the step.
        optimizer_bytes: AdamW's two moments.
        activation_bytes: kept for backward.
    """

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of the four."""
        return (
            self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes
        )

    def __str__(self) -> str:
        """Return one line, in MiB."""
        parts = {
            "weights": self.weight_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activation_bytes,
        }
        listed = " + ".join(f"{name} {size / 2**20:,.1f}" for name, size in parts.items())
        return f"{listed} = {self.total_bytes / 2**20:,.1f} MiB a rank"


def plan_memory(
    model: nn.Module,
    mesh: MeshConfig,
    world_size: int,
    *,
    sample: Tensor | None = None,
    strategy: Strategy = "zero3",
    checkpoint_activations: bool = False,
) -> MemoryPlan:
    """Return what each rank needs; not collective, and nothing is computed or allocated.

    Layers count as evenly cut over `tp` and `pp`: a model with large weights that stay whole needs
    more than this.

    Args:
        model: whole; may be on the meta device.
        mesh: the degrees.
        world_size: number of ranks.
        sample: inputs of one rank's micro-batch; without it, activations are left out.
        strategy: of `parallelize`.
        checkpoint_activations: of `parallelize`.

    Raises:
        ValueError: the degrees do not multiply to the world size.
    """
    degrees = mesh.degrees(world_size)
    cut = degrees[Axis.TP] * degrees[Axis.PP]
    shards = degrees[Axis.DP_SHARD] * degrees[Axis.CP] * degrees[Axis.EP]
    held = _bytes(model) // cut
    sizes = [_bytes(module) // cut for module in blocks(model)]
    at_once = held - sum(sizes) + max(sizes, default=0)  # one block, and what is in none
    own = held if strategy == "ddp" else held // shards
    gathered = {"ddp": 0, "zero1": held, "zero2": held, "zero3": at_once}[strategy]
    if shards == 1:
        gathered = 0
    gradients = held if strategy in ("ddp", "zero1") else own
    activations = 0
    if sample is not None:
        kept = activation_bytes(model, sample, checkpoint_activations=checkpoint_activations)
        activations = kept // (degrees[Axis.TP] * degrees[Axis.CP])
    return MemoryPlan(
        weight_bytes=own + gathered,
        gradient_bytes=gradients,
        optimizer_bytes=2 * own,
        activation_bytes=activations,
    )


def activation_bytes(
    model: nn.Module, sample: Tensor, *, checkpoint_activations: bool = False
) -> int:
    """Return the bytes that autograd keeps of one forward of `sample`, weights not counted.

    Args:
        model: on any device; nothing of it is touched.
        sample: inputs; only shape and dtype matter.
        checkpoint_activations: count the inputs of blocks, and the inside of the largest one.

    Raises:
        ValueError: the model's forward looks at values, which the meta device has not.
    """
    weights = {n: p.detach().to("meta").requires_grad_() for n, p in model.named_parameters()}
    weights |= {name: buffer.to("meta") for name, buffer in model.named_buffers()}
    count = _Kept({tensor.untyped_storage()._cdata for tensor in weights.values()})
    hooks = [hook for block in blocks(model) for hook in count.watch(block)]
    try:
        with torch.autograd.graph.saved_tensors_hooks(count.keep, lambda tensor: tensor):
            functional_call(model, weights, (sample.to("meta"),))
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"the activations of {type(model).__name__} were to be counted on the meta device, "
            f"which met: {error}; leave sample out"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if checkpoint_activations:
        return count.outside + count.inputs + max(count.inside.values(), default=0)
    return count.outside + sum(count.inside.values())


class _Kept:
    """Sizes of what autograd keeps, inside and outside blocks; each storage counts once."""

    def __init__(self, known: set[int]) -> None:
        self._known = known
        self._alive: list[Tensor] = []  # or the address of a storage would be used again
        self._block: int | None = None
        self.outside = 0
        self.inputs = 0
        self.inside: dict[int, int] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._alive.append(tensor)
            if self._block is None:
                self.outside += storage.nbytes()
            else:
                self.inside[self._block] = self.inside.get(self._block, 0) + storage.nbytes()
        return tensor

    def watch(self, block: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._block = id(block)
            first = next((a for a in args if isinstance(a, Tensor)), None)
            self.inputs += 0 if first is None else first.numel() * first.element_size()

        def leave(*_: Any) -> None:
            self._block = None

        return block.register_forward_pre_hook(enter), block.register_forward_hook(leave)


def choose_mesh(
    model: nn.Module,
    *,
    world_size: int,
    device_bytes: int,
    sample: Tensor | None = None,
    max_tp: int = 8,
) -> ChosenMesh:
    """Return the first mesh that fits, those that talk least first; `why` lists all looked at.

    First replicas, then shards of more and more ranks, then tensor parallel over 2, 4, ... ranks
    for the models whose plan is known.

    Args:
        model: whole; may be on the meta device.
        world_size: number of ranks.
        device_bytes: memory that a rank may use.
        sample: inputs of one rank's micro-batch, to count activations.
        max_tp: most ranks on `tp`: those of one host.

    Raises:
        ValueError: none fits; the text lists them.
    """
    lines = []
    for degrees in _candidates(model, world_size, max_tp):
        plan = plan_memory(model, MeshConfig(**degrees), world_size, sample=sample)
        fits = plan.total_bytes <= device_bytes
        named = " x ".join(f"{axis} {size}" for axis, size in degrees.items())
        lines.append(f"{named}: {plan}; {'fits' if fits else 'does not fit'}")
        if fits:
            return ChosenMesh(**degrees, why="\n".join([*_title(device_bytes), *lines]))
    raise ValueError(
        f"no mesh of {world_size} ranks holds {type(model).__name__} in "
        f"{device_bytes / 2**20:,.1f} MiB a rank:\n" + "\n".join(lines) + "\nstart more ranks, "
        "or use checkpoint_activations=True and fewer rows a micro-batch"
    )


def _title(device_bytes: int) -> list[str]:
    return [f"looked for at most {device_bytes / 2**20:,.1f} MiB a rank, least talk first"]


def _candidates(model: nn.Module, world_size: int, max_tp: int) -> Iterator[dict[str, int]]:
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for shard in divisors:
        yield {"dp_replicate": world_size // shard, "dp_shard": shard}
    for tp in divisors[1:]:
        if tp <= max_tp and _has_plan(model, tp):
            yield {"dp_shard": world_size // tp, "tp": tp}


def _has_plan(model: nn.Module, tp: int) -> bool:
    try:
        resolve_plan(model, None, tp, sequence_parallel=False, loss_parallel=False)
    except ValueError:
        return False
    return True


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def free_bytes() -> int:
    """Return the memory that this rank may use: its GPU's free part, or its share of the host's."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    import psutil

    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return int(psutil.virtual_memory().available) // on_this_host
