"""A slow rank is named with its phase, on all ranks, from times that ride along."""

import logging
import time

import torch

from nbdist.testing import run_ranks
from nbdist.train import (
    DecoderConfig,
    DecoderLM,
    TextData,
    TrainConfig,
    Trainer,
    build_mesh,
    next_token_loss,
    parallelize,
    shakespeare,
)
from nbdist.train.phases import Phase

SLOW_RANK = 1
# Far above what a step of this model takes on a busy machine. DDP waits inside its first two
# forwards, where it is not seen: the median of eight steps leaves them out.
LOST_SECONDS = 0.05
LOSES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.SAVE)


class _Lose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(LOST_SECONDS)
        return grad


class _SlowRows:
    def __init__(self, rows):
        self._rows = rows

    def batch(self, step):
        time.sleep(LOST_SECONDS)
        return self._rows.batch(step)


def _trainer(loses, num_steps, **change):
    data = TextData(shakespeare()[:12_000], vocab_size=264, context_length=12, seed=2)
    config = DecoderConfig(vocab_size=264, num_layers=1, hidden_size=24, context_length=12)

    def loss_fn(logits, targets):
        if loses == Phase.FORWARD:
            time.sleep(LOST_SECONDS)
        return next_token_loss(_Lose.apply(logits) if loses == Phase.BACKWARD else logits, targets)

    settings = {"num_steps": num_steps, "global_batch_size": 6, "loss_fn": loss_fn, **change}
    model = parallelize(DecoderLM(config), build_mesh(), strategy="ddp")
    trainer = Trainer(model, data, TrainConfig(**settings))
    if loses == Phase.DATA:
        trainer.data = _SlowRows(trainer.data)
    elif loses == Phase.OPTIMIZER:
        trainer.optimizer.register_step_pre_hook(lambda *_: time.sleep(LOST_SECONDS))
    elif loses == Phase.SAVE:
        trainer.survival.step_done = lambda: time.sleep(LOST_SECONDS)
    return trainer


class _Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def named(rank):
    """Return what is found for each phase, and what was logged."""
    kept = _Kept()
    logging.getLogger("nbdist.train.timing").addHandler(kept)
    found = {}
    for phase in LOSES:
        trainer = _trainer(phase if rank == SLOW_RANK else None, 9, straggler_steps=8)
        trainer.fit()
        timing = trainer.timing
        found[phase] = (timing.straggler, timing.seconds, timing.glance(), repr(timing))
    even = _trainer(None, 6, straggler_steps=5, straggler_ratio=50)
    history = even.fit()
    return found, kept.texts, even.timing.straggler, even.timing.memory_bytes, history.records[-1]


def test_a_slow_rank_is_named_with_its_phase_on_all_ranks():
    answers = run_ranks(named, 3)

    for found, _, none, memory_bytes, record in answers:
        for phase, (straggler, seconds, glance, table) in found.items():
            assert (straggler.rank, straggler.phase) == (SLOW_RANK, phase)
            # a sleep lasts at least that long; half of it allows for other ranks' noise
            assert straggler.phase_seconds - straggler.usual_phase_seconds > LOST_SECONDS / 2
            waits = [row[Phase.COMMUNICATION] for row in seconds]
            assert min(waits[0], waits[2]) > waits[SLOW_RANK] + LOST_SECONDS / 2
            assert f"slow: rank 1 ({phase})" in glance
            assert "rank 1 is slow" in table
        assert none is None
        assert len(memory_bytes) == 3
        assert min(memory_bytes) > 2**24
        assert 0 < record.mfu < 1
        assert found == answers[0][0]
    assert [text.split(":")[0] for text in answers[0][1]] == ["rank 1 is slow"] * len(LOSES)
    assert answers[1][1] == []
