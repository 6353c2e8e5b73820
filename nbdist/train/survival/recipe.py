"""How to build again, on any rank, what a trainer has, without its state (ranks)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from nbdist.train.mesh import DATA_AXES, Axis, resized_degrees
from nbdist.train.parallelize import applied_to, bare, parallelize
from nbdist.train.survival.packing import NAMESPACE, Surroundings, pack, unpack, why_not_packed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from nbdist.train.config import TrainConfig
    from nbdist.train.data import TrainData
    from nbdist.train.metrics import StepRecord
    from nbdist.train.parallelize.skeleton import Skeleton
    from nbdist.train.trainer import Trainer

__all__ = [
    "PackedTrainer",
    "Recipe",
    "known_objects",
    "pack_trainer",
    "unpack_trainer",
    "why_not_rebuilt",
]


PackedTrainer = tuple[Surroundings, bytes, bytes]
"""Where the process looked for modules, the trainer's class, and its recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a new rank needs to build what a survivor has, without its state.

    Attributes:
        micro_rows: most rows of a micro-batch, whatever the number of ranks.
        is_resized: it is for another number of ranks than the state was taken on.
    """

    skeleton: Skeleton
    options: Mapping[str, Any]
    device_type: str
    degrees: dict[str, int]
    data: TrainData
    config: TrainConfig
    records: list[StepRecord]
    micro_rows: int
    is_resized: bool = False

    @classmethod
    def of(cls, trainer: Trainer, data: TrainData) -> Recipe:
        """Return the recipe of a trainer."""
        applied = applied_to(trainer.model)
        assert applied is not None, "checked when fit() began"
        assert applied.again is not None, "spread by `parallelize`"
        names = trainer.mesh.mesh_dim_names or ()
        return cls(
            skeleton=applied.again.skeleton,
            options=applied.again.options,
            device_type=trainer.mesh.device_type,
            degrees=dict(zip(names, trainer.mesh.shape, strict=True)),
            data=data,
            config=trainer.config,
            records=trainer.history.records,
            micro_rows=trainer.survival.micro_rows,
        )

    def for_world(self, world_size: int) -> Recipe:
        """Return the recipe of the same run on another number of ranks.

        The global batch stays. Micro-batches have at most as many rows as when the trainer was
        made: what is too much for them is accumulated.

        Raises:
            ValueError: as `resized_degrees`, or a rank would have no row.
        """
        degrees = resized_degrees(self.degrees, world_size)
        num_ranks = math.prod(degrees.get(axis, 1) for axis in DATA_AXES)
        fewest, rest = divmod(self.config.global_batch_size, num_ranks)
        if not fewest:
            raise ValueError(
                f"{world_size} ranks were asked for, but global_batch_size="
                f"{self.config.global_batch_size} has no row for each of the {num_ranks} that "
                f"see rows of their own; ask for fewer ranks"
            )
        number = min(fewest, math.ceil((fewest + bool(rest)) / self.micro_rows))
        is_piped = degrees.get(Axis.PP, 1) > 1  # it cuts rows into micro-batches itself
        config = self.config
        if not is_piped and number != config.accumulation_steps:
            config = dataclasses.replace(config, accumulation_steps=number)
        return dataclasses.replace(self, degrees=degrees, config=config, is_resized=True)

    def build(self) -> tuple[nn.Module, DeviceMesh]:
        """Return the model, spread over a new mesh, and that mesh. Collective over: all ranks."""
        mesh = init_device_mesh(
            self.device_type, tuple(self.degrees.values()), mesh_dim_names=tuple(self.degrees)
        )
        whole = self.skeleton.build(torch.device(self.device_type))
        return parallelize(whole, mesh, **self.options), mesh


def known_objects(trainer: Trainer, data: TrainData) -> dict[str, Any]:
    """Return the objects that every rank builds itself, by a name that all ranks use."""
    return {
        "trainer": trainer,
        "model": trainer.model,
        "bare": bare(trainer.model),
        "optimizer": trainer.optimizer,
        "mesh": trainer.mesh,
        "data": data,
        "config": trainer.config,
    }


def pack_trainer(recipe: Recipe, trainer: Trainer, namespace: dict[str, Any]) -> PackedTrainer:
    """Return a trainer's class and recipe for a new rank, packed; see `unpack_trainer`."""
    known = {NAMESPACE: namespace}
    packed = pack(recipe, known | {"trainer": trainer})
    return Surroundings.here(), pack(type(trainer), known), packed


def unpack_trainer(packed: PackedTrainer, namespace: dict[str, Any]) -> tuple[Trainer, Recipe]:
    """Return a new trainer without state, as others have one. Collective over: all ranks."""
    surroundings, kind, rest = packed
    surroundings.enter()
    # Data and settings may refer to the trainer, which is made with them.
    known: dict[str, Any] = {NAMESPACE: namespace}
    made: type[Trainer] = unpack(kind, known)
    trainer = made.__new__(made)
    recipe: Recipe = unpack(rest, known | {"trainer": trainer})
    model, mesh = recipe.build()
    made.__init__(trainer, model, recipe.data, recipe.config, mesh=mesh)
    trainer.survival.micro_rows = recipe.micro_rows
    trainer.history.records[:] = recipe.records
    return trainer, recipe


def why_not_rebuilt(trainer: Trainer, data: TrainData, namespace: dict[str, Any]) -> str:
    """Return why a trainer cannot be built again, in words; empty when it can."""
    applied = applied_to(trainer.model)
    skeleton = applied.again.skeleton if applied and applied.again else None
    if skeleton is None:
        return "it came spread over the ranks already"
    return skeleton.problem or why_not_packed(
        Recipe.of(trainer, data), {"trainer": trainer, NAMESPACE: namespace}
    )
