"""A model built again from a recipe, with the state of a copy, goes on as if nothing had been."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nbdist.errors import NbdistError
from nbdist.testing import run_ranks
from nbdist.train import (
    DecoderConfig,
    DecoderLM,
    MeshConfig,
    PipelineConfig,
    TextData,
    TrainConfig,
    Trainer,
    build_mesh,
    parallelize,
    shakespeare,
)
from nbdist.train.survival.mirror import Mirror
from nbdist.train.survival.recipe import Recipe
from nbdist.train.survival.state import Slot, layout_of, restore

CONFIG = {"vocab_size": 264, "num_layers": 2, "num_heads": 4, "hidden_size": 24,
          "ffn_multiple": 2, "context_length": 12}  # fmt: skip
CASES = {
    2: {
        "ddp": ({"dp_replicate": 2}, {}, {"strategy": "ddp"}, {}),
        "zero3": ({}, {}, {}, {"autocast_dtype": "bfloat16"}),
        "dropout": ({}, {}, {}, {}),
        "tp": ({"tp": 2}, {}, {"sequence_parallel": True, "loss_parallel": True}, {}),
        "pp": ({"pp": 2}, {"tie_embeddings": False},
               {"pipeline": PipelineConfig(schedule="interleaved")}, {}),
        "cp": ({"cp": 2}, {}, {}, {"accumulation_steps": 2}),
        "ep": ({"ep": 2}, {"num_experts": 4}, {"checkpoint_activations": True}, {}),
    },
    4: {"hsdp": ({"dp_replicate": 2, "dp_shard": 2}, {}, {}, {}),
        "fsdp and tp": ({"dp_shard": 2, "tp": 2}, {}, {}, {})},
}  # fmt: skip


class _Dropping(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.layers = torch.nn.ModuleList([inner])
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens):
        self.calls += 1
        return torch.nn.functional.dropout(self.layers[0](tokens), 0.1, self.training)


def _trainer(data, mesh, model, options, train, *, drops):
    built = DecoderLM(DecoderConfig(**CONFIG | model), seed=1)
    built = parallelize(_Dropping(built) if drops else built, build_mesh(mesh), **options)
    return Trainer(built, data, TrainConfig(num_steps=3, global_batch_size=8, **train))


def build_again(rank, cases):
    del rank
    data = TextData(shakespeare()[:12_000], vocab_size=264, context_length=12, seed=2)
    found = {}
    for name, (degrees, model, options, train) in cases.items():
        trainer = _trainer(
            data, MeshConfig(**({"dp_shard": 1} | degrees) if degrees else {}), model, options,
            train, drops=name == "dropout",
        )  # fmt: skip
        trainer.fit()
        mirror = Mirror(trainer.model, trainer.optimizer, trainer.mesh)
        mirror.take(trainer.step, trainer.notes())
        mirror.settle()
        object.__setattr__(trainer.config, "num_steps", 6)
        expected = trainer.fit().losses
        unbroken = [t.clone() for t in layout_of(trainer.model, trainer.optimizer)[1]]
        slot = mirror.own_at(3)
        recipe = Recipe.of(trainer, data)
        trainer.assemble(*recipe.build())
        restore(slot, trainer.model, trainer.optimizer)
        trainer.take_notes(3, slot.notes.tolist())
        trainer.history.forget_after(3)
        fresh = Slot(slot.layout)
        layout, tensors = layout_of(trainer.model, trainer.optimizer)
        fresh.fill(3, tensors, trainer.notes())
        slot.restore_rng()
        again = trainer.fit().losses
        tensors = layout_of(trainer.model, trainer.optimizer)[1]
        found[name] = {
            "layout": layout == slot.layout,
            "digest": fresh.digest == slot.digest == slot.compute_digest(),
            "losses": again == expected and len(again) == 6,
            "tensors": all(torch.equal(a, b) for a, b in zip(tensors, unbroken, strict=True)),
        }
    return found


@pytest.mark.parametrize("world_size", CASES)
def test_a_rebuilt_trainer_goes_on_bit_for_bit(world_size):
    for rank, found in enumerate(run_ranks(build_again, world_size, CASES[world_size])):
        for name, checks in found.items():
            assert checks == dict.fromkeys(checks, True), f"{name} on rank {rank}"


def mirrored(rank):
    """Return what neighbours keep of each other, and what a change of the model does."""
    dist.barrier()
    model = parallelize(torch.nn.Linear(3, 3), build_mesh(), strategy="zero3")
    optimizer = torch.optim.AdamW(model.parameters())
    mirror = Mirror(model, optimizer, build_mesh())
    mirror.take(0, [])
    for step in range(1, 4):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        mirror.take(step, [step + rank / 10])
    mirror.settle()
    kept = mirror.kept_at(3)
    mine = mirror.own_at(3)
    sent = [None] * dist.get_world_size()
    dist.all_gather_object(sent, mine.flat)
    offer = mirror.offer(3)
    same = torch.equal(kept.flat, sent[offer.neighbour])
    problem = ""
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    optimizer.param_groups[-1]["params"][0].grad = torch.ones(1)
    optimizer.step()
    try:
        mirror.take(4, [])
    except NbdistError as error:
        problem = str(error)
    return offer, same, kept.notes[0].item(), problem


def test_neighbours_keep_the_last_two_states():
    for rank, (offer, same, note, problem) in enumerate(run_ranks(mirrored, 3)):
        assert (offer.own, offer.kept, offer.is_whole) == ((2, 3), (2, 3), True)
        assert offer.neighbour == (rank - 1) % 3
        assert same
        assert note == pytest.approx(3 + offer.neighbour / 10)
        assert "has other tensors than when fit() began" in problem
