"""What a model needs on each rank, and which mesh to take (ranks).

ZeRO's sums (arXiv 1910.02054, section 3): weights, gradients and two AdamW moments, each of the
size of the weights. Activations are counted, not estimated (`nbdist.train.activations`). What of
all this is there at one time was found by measuring, as `tests/ranks/test_memory.py` does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nbdist.train.activations import Kept, count_kept, local_weights
from nbdist.train.mesh import Axis, MeshConfig
from nbdist.train.parallelize.data import blocks
from nbdist.train.parallelize.tensor import resolve_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from nbdist.train.parallelize.record import Strategy

__all__ = [
    "ChosenMesh",
    "MemoryPlan",
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
    """Bytes on each rank in a step, after the first; the allocator's rest comes on top.

    Not all of it is there at once: as backward goes on, gradients take the place of activations.

    Attributes:
        weight_bytes: of the rank's shard, and of what is gathered beside it in backward.
        gradient_bytes: of the rank's gradients before the update.
        optimizer_bytes: AdamW's two moments.
        activation_bytes: kept for backward.
        output_bytes: of the model's output. The loss keeps another, and backward begins with a
            third.
        buffer_bytes: of gradients that are being reduced: whole ones, and what is sent.
        total_bytes: the most at one time.
    """

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    output_bytes: int
    buffer_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        """Return one line, in MiB."""
        parts = {
            "weights": self.weight_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activation_bytes,
            "output": self.output_bytes,
            "buffers": self.buffer_bytes,
        }
        listed = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in parts.items() if size)
        return f"at most {self.total_bytes / 2**20:,.1f} MiB a rank ({listed})"


def plan_memory(
    model: nn.Module,
    mesh: MeshConfig,
    world_size: int,
    *,
    sample: Tensor | None = None,
    strategy: Strategy = "zero3",
    checkpoint_activations: bool = False,
    accumulation_steps: int = 1,
) -> MemoryPlan:
    """Return what each rank needs; not collective, and nothing is computed or allocated.

    Layers count as evenly cut over `pp`, and activations as those of one micro-batch on one rank.

    Args:
        model: whole; may be on the meta device.
        mesh: the degrees.
        world_size: number of ranks.
        sample: inputs of one rank's micro-batch; without it, activations are left out.
        strategy: of `parallelize`.
        checkpoint_activations: of `parallelize`.
        accumulation_steps: of `TrainConfig`.

    Raises:
        ValueError: the degrees do not multiply to the world size, or `tp` does not fit the model.
    """
    degrees = mesh.degrees(world_size)
    sizes = _Sizes.of(model, degrees)
    kept = Kept(0, 0)
    if sample is not None:
        tp = degrees[Axis.TP]
        kept = count_kept(model, sample, checkpoint_activations=checkpoint_activations, tp=tp)
        kept = Kept(*(size // degrees[Axis.CP] for size in kept))
    return _planned(sizes, kept, strategy, adds_up=accumulation_steps > 1)


def _planned(sizes: _Sizes, kept: Kept, strategy: Strategy, *, adds_up: bool) -> MemoryPlan:
    own = sizes.held if strategy == "ddp" else sizes.own
    is_whole = strategy == "ddp" or (adds_up and strategy in ("zero1", "zero3"))
    gradients = sizes.held if is_whole else own
    stays = adds_up or (strategy == "ddp" and sizes.is_data_parallel)  # DDP's are in its buckets
    before = kept.activations + (gradients if stays else 0)
    gathered, at_loss, buffers = sizes.beside(strategy)
    peak = max(
        before + 3 * kept.output + at_loss,
        before + kept.output + gathered + buffers,
        gradients + gathered + buffers,
    )
    return MemoryPlan(
        weight_bytes=own + gathered,
        gradient_bytes=gradients,
        optimizer_bytes=2 * own,
        activation_bytes=kept.activations,
        output_bytes=kept.output,
        buffer_bytes=buffers,
        total_bytes=3 * own + peak,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Bytes of a rank's weights.

    Attributes:
        held: all that a replica has here.
        own: of that, the rank's shard.
        block: the largest block.
        rest: what is in no block; FSDP treats it as one more.
        is_data_parallel: whether there are others with the same layers.
        is_sharded: whether FSDP is at work, perhaps on one rank.
    """

    held: int
    own: int
    block: int
    rest: int
    is_data_parallel: bool
    is_sharded: bool

    @classmethod
    def of(cls, model: nn.Module, degrees: dict[str, int]) -> _Sizes:
        local = local_weights(model, degrees[Axis.TP])
        size = {key: weight.untyped_storage().nbytes() for key, weight in local.items()}
        pp = degrees[Axis.PP]
        held = sum(size.values()) // pp
        inside = [sum(size[id(p)] for p in block.parameters()) for block in blocks(model)]
        shards = degrees[Axis.DP_SHARD] * degrees[Axis.CP] * degrees[Axis.EP]
        has_others = shards * degrees[Axis.DP_REPLICATE] > 1
        return cls(
            held=held,
            own=held // shards,
            block=max(inside, default=0),
            rest=held - sum(inside) // pp,
            is_data_parallel=has_others,
            is_sharded=has_others or pp * degrees[Axis.TP] == 1,
        )

    def beside(self, strategy: Strategy) -> tuple[int, int, int]:
        """Return what FSDP holds: gathered in backward, gathered at the loss, and buffers."""
        if strategy == "ddp" or not self.is_sharded:
            return 0, 0, 0
        buffers = max(self.rest + 2 * self.block, 2 * self.rest)
        if strategy == "zero3":  # a block is gathered while the one before it is in use
            return min(self.rest + 2 * self.block, self.held), 0, buffers
        return self.held, self.held, buffers


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


def free_bytes() -> int:
    """Return the memory that this rank may use: its GPU's free part, or its share of the host's."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    import psutil

    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return int(psutil.virtual_memory().available) // on_this_host
