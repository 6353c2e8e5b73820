"""On the ranks of a world, waiting is seen inside sharded forwards and backwards as well."""

import pytest

pytestmark = pytest.mark.cluster

CELL = """
import time
import torch
from nbdist.train import *

class Lose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.05)
        return grad

data = TextData(shakespeare()[:12_000], vocab_size=264, context_length=12)
found = []
for phase in ("forward", "backward"):
    def loss_fn(logits, targets):
        if rank == 1 and phase == "forward":
            time.sleep(0.05)
        slow = rank == 1 and phase == "backward"
        return next_token_loss(Lose.apply(logits) if slow else logits, targets)

    config = DecoderConfig(vocab_size=264, num_layers=1, hidden_size=24, context_length=12)
    model = parallelize(DecoderLM(config), build_mesh(), strategy="zero3")
    settings = TrainConfig(num_steps=8, straggler_steps=6, global_batch_size=6, loss_fn=loss_fn)
    trainer = Trainer(model, data, settings)
    trainer.fit()
    straggler = trainer.timing.straggler
    found.append((straggler.rank, str(straggler.phase)))
"""


def test_slow_rank_of_a_sharded_run_is_named_with_its_phase(world):
    result = world.run(CELL + "print(found)")

    told = [result.text[rank].strip().splitlines()[-1] for rank in (0, 1)]
    assert told == ["[(1, 'forward'), (1, 'backward')]"] * 2
