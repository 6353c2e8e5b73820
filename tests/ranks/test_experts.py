"""Experts on real ranks: refusals, and a checkpoint that moves from `ep` to shards."""

import pytest

from nbdist.testing import run_ranks
from nbdist.train import (
    CheckpointConfig,
    DecoderConfig,
    DecoderLM,
    MeshConfig,
    TextData,
    TrainConfig,
    Trainer,
    build_mesh,
    parallelize,
    shakespeare,
)


def _decoder(**change):
    base = {"vocab_size": 280, "num_layers": 2, "hidden_size": 16, "context_length": 12}
    return DecoderLM(DecoderConfig(**base | {"num_experts": 4} | change)).double()


def _fit(rank, directory, mesh, num_steps):
    trainer = Trainer(
        parallelize(_decoder(), build_mesh(mesh)),
        TextData(shakespeare()[:8000], vocab_size=280, context_length=12),
        TrainConfig(
            num_steps=num_steps,
            global_batch_size=4,
            final_learning_rate_fraction=1.0,  # rates must not depend on where a run is cut
            checkpoint=CheckpointConfig(directory=directory, every_steps=2),
        ),
    )
    experts = trainer.model.layers[0].ffn.experts
    return trainer.fit(resume="auto").losses, trainer.evaluate(), experts.gate.to_local().shape[0]


def test_checkpoint_of_experts_on_ranks_goes_on_on_shards(tmp_path):
    losses, validation, _ = run_ranks(_fit, 1, tmp_path / "steady", MeshConfig(), 4)[0]

    first = run_ranks(_fit, 2, tmp_path / "moved", MeshConfig(ep=2), 2)
    moved = run_ranks(_fit, 2, tmp_path / "moved", MeshConfig(), 4)

    assert [result[2] for result in first] == [2, 2]  # of 4 experts
    for found in moved:
        assert found[0] == pytest.approx(losses[2:], abs=1e-11)
        assert found[1] == pytest.approx(validation, abs=1e-11)


def _refused(rank):
    ep, pp = build_mesh(MeshConfig(ep=2)), build_mesh(MeshConfig(pp=2))
    tp = build_mesh(MeshConfig(tp=2))
    texts = {}
    for name, ask in {
        "dense": lambda: parallelize(_decoder(num_experts=0), ep),
        "uneven": lambda: parallelize(_decoder(num_experts=3), ep),
        "balance": lambda: parallelize(_decoder(tie_embeddings=False), pp),
        "sequence": lambda: parallelize(_decoder(), tp, sequence_parallel=True),
    }.items():
        try:
            ask()
        except ValueError as error:
            texts[name] = str(error)
    return texts


def test_what_experts_cannot_do_is_refused_with_what_to_set():
    for texts in run_ranks(_refused, 2):
        assert "set ep=1 and dp_shard instead" in texts["dense"]
        assert "`layers.0.ffn` has 3 experts, which ep=2 does not divide" in texts["uneven"]
        assert "set balance_weight=0 or pp=1" in texts["balance"]
        assert "routing needs whole rows" in texts["sequence"]
