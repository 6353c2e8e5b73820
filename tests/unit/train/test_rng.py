"""Random states survive JSON; ranks draw different numbers."""

import json
import random

import numpy as np
import torch

from nbdist.train.rng import restore_rng, rng_state, seed_rng


def _draw():
    return torch.rand(3).tolist(), np.random.standard_normal(3).tolist(), random.gauss(0, 1)


def test_restored_generators_go_on_with_the_same_numbers():
    seed_rng(1, 2, 3)
    _draw()  # leaves half a gaussian pair cached in numpy and random
    saved = json.dumps(rng_state())
    expected = _draw()
    _draw()

    restore_rng(json.loads(saved))

    assert _draw() == expected


def test_seeds_differ_by_rank_and_step_and_repeat():
    def draw(*words):
        seed_rng(*words)
        return _draw()

    assert draw(0, 0, 0) == draw(0, 0, 0)
    assert len({str(draw(0, step, rank)) for step in range(3) for rank in range(3)}) == 9
