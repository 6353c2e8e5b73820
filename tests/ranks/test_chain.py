"""One run handed from mesh to mesh: the losses, and every sample once, as if it were unbroken."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

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
    shakespeare,
)
from nbdist.train.rng import restore_rng, rng_state, seed_rng

STEPS_EACH = 4
# float64: every mesh sums in another order; Adam raises 1e-16 over the steps of the chain
TOLERANCE = 1e-10

CHAINS = {
    "world sizes": [{"dp_shard": 2}, {"dp_shard": 3}, {"dp_shard": 1}, {"dp_shard": 4}],
    "meshes": [{"dp_shard": 2}, {"dp_shard": 1, "tp": 2}, {"dp_shard": 1, "pp": 2}],
}


class _Noted:
    """A rank's rows; notes the ids of those that were really taken."""

    def __init__(self, rows, taken):
        self._rows, self._taken = rows, taken

    def batch(self, step):
        self._taken += [(step, number) for number in self._rows.sample_ids(step)]
        return self._rows.batch(step)


class _NotedData:
    def __init__(self, data):
        self._data = data
        self.taken = []

    def for_rank(self, **place):
        return _Noted(self._data.for_rank(**place), self.taken)


def _link(rank, directory, num_steps, degrees):
    """Train one link of a chain; return its losses and this rank's samples."""
    data = _NotedData(TextData(shakespeare()[:20_000], vocab_size=280, context_length=16))
    sizes = {"num_layers": 2, "hidden_size": 16, "context_length": 16, "tie_embeddings": False}
    config = TrainConfig(
        num_steps=num_steps,
        global_batch_size=12,
        warmup_steps=100,  # the rate rises all the time: it does not depend on num_steps
        checkpoint=CheckpointConfig(directory=directory),
    )
    model = DecoderLM(DecoderConfig(vocab_size=280, **sizes)).double()
    trainer = Trainer(model, data, config, mesh=build_mesh(MeshConfig(**degrees)))
    return trainer.fit(resume="auto").losses, data.taken


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    num_steps = STEPS_EACH * max(map(len, CHAINS.values()))
    losses, taken = run_ranks(_link, 1, tmp_path_factory.mktemp("whole"), num_steps, {})[0]
    assert len(losses) == num_steps
    return losses, taken


@pytest.mark.parametrize("name", CHAINS)
def test_chain_equals_the_unbroken_run_and_takes_each_sample_once(unbroken, tmp_path, name):
    losses, taken = [], Counter()
    for number, degrees in enumerate(CHAINS[name], start=1):
        num_ranks = degrees["dp_shard"] * degrees.get("tp", 1) * degrees.get("pp", 1)
        found = run_ranks(_link, num_ranks, tmp_path, number * STEPS_EACH, degrees)
        losses += found[0][0]
        seen = Counter(sample for _, theirs in found for sample in theirs)
        copies = num_ranks // degrees["dp_shard"]  # ranks of tp and pp share their rows
        assert set(seen.values()) == {copies}
        taken += Counter(seen.keys())

    num_steps = len(CHAINS[name]) * STEPS_EACH
    assert losses == pytest.approx(unbroken[0][:num_steps], abs=TOLERANCE)
    assert taken == Counter(sample for sample in unbroken[1] if sample[0] < num_steps)


def test_all_generators_of_a_rank_go_on_from_their_states():
    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()

    seed_rng(1, 2, 3)
    np.random.standard_normal()  # leaves the second of a pair behind
    state = rng_state()
    first = draw()
    seed_rng(4, 5, 6)
    assert draw() != first

    restore_rng(state)

    assert draw() == first
