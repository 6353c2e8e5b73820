"""Compiled blocks against the same blocks as they are, and what cannot be compiled."""

import pytest
import torch

from nbdist.testing import run_ranks
from nbdist.train import (
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
from nbdist.train.parallelize import whole

# float64, three steps of AdamW: the compiler fuses and orders sums in other ways, which differ by
# 1e-16 of their terms; Adam's division raises that, as in tests/ranks/test_parity.py
TOLERANCE = 1e-11

CASES = {
    "ddp": {"strategy": "ddp"},
    "zero3, recomputed": {"checkpoint_activations": True},
}


def _decoder(**change):
    size = {"vocab_size": 280, "num_layers": 2, "hidden_size": 32, "context_length": 12}
    return DecoderLM(DecoderConfig(**size | change)).double()


def _train(data, options):
    trainer = Trainer(
        parallelize(_decoder(), build_mesh(), **options),
        data,
        TrainConfig(num_steps=3, global_batch_size=4),
    )
    losses = trainer.fit().losses
    return losses, {name: whole(p.detach()) for name, p in trainer.model.named_parameters()}


def _compare(rank):
    data = TextData(shakespeare()[:8000], vocab_size=280, context_length=12)
    found = {}
    for name, options in CASES.items():
        torch._dynamo.utils.counters.clear()
        plain_losses, plain = _train(data, options)
        assert not torch._dynamo.utils.counters["stats"]
        losses, weights = _train(data, {**options, "compile_blocks": True})
        assert weights.keys() == plain.keys()
        found[name] = (
            max(abs(a - b) for a, b in zip(losses, plain_losses, strict=True)),
            max(float((weights[n] - plain[n]).abs().max()) for n in plain),
            torch._dynamo.utils.counters["stats"]["unique_graphs"],
            sum(torch._dynamo.utils.counters["graph_break"].values()),
        )
    return found, _refused(data)


def _refused(data):
    """Return what is said about models that cannot be compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        asked = {
            "tp": lambda: parallelize(
                _decoder(), build_mesh(MeshConfig(dp_shard=1, tp=2)), compile_blocks=True
            ),
            "experts": lambda: parallelize(
                _decoder(num_experts=2), build_mesh(), compile_blocks=True
            ),
            "compiler": lambda: parallelize(_decoder(), build_mesh(), compile_blocks=True),
        }
        texts = {}
        for name, ask in asked.items():
            with pytest.raises(ValueError) as told:
                ask()
            texts[name] = str(told.value)
    with pytest.raises(ValueError) as told:
        Trainer(
            parallelize(_decoder(), build_mesh(), compile_blocks=True),
            data,
            TrainConfig(num_steps=3, global_batch_size=4, detect_anomaly=True),
        )
    return texts | {"anomaly": str(told.value)}


def test_compiled_blocks_train_as_plain_ones_and_the_rest_is_refused():
    for found, texts in run_ranks(_compare, 2, timeout_seconds=110):
        assert found.keys() == CASES.keys()
        for name, (loss, weight, num_graphs, num_breaks) in found.items():
            assert loss < TOLERANCE, name
            assert weight < TOLERANCE, name
            # both blocks are one graph: they were compiled, and once
            assert (num_graphs, num_breaks) == (1, 0), name
        assert "a model with tp=2" in texts["tp"]
        assert "a model with experts" in texts["experts"]
        assert "the compiler `no-such-compiler`, which torch.compile needs" in texts["compiler"]
        assert "leave one of the two out" in texts["anomaly"]
