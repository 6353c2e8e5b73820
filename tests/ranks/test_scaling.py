"""A scaling report compares with one plain rank, and changes nothing of the run."""

import pytest
import torch

from nbdist.errors import NbdistError
from nbdist.testing import run_ranks
from nbdist.train import (
    DecoderConfig,
    DecoderLM,
    MeshConfig,
    TextData,
    TrainConfig,
    Trainer,
    build_mesh,
    next_token_loss,
    parallelize,
    shakespeare,
)
from nbdist.train.scaling import ScalingReport

MESHES = [{"dp_shard": 2}, {"dp_shard": 1, "tp": 2}, {"dp_shard": 1, "pp": 2}]


class _Dropping(torch.nn.Module):
    """A model whose steps draw random numbers."""

    def __init__(self, inner):
        super().__init__()
        self.layers = torch.nn.ModuleList([inner])

    def forward(self, tokens):
        return torch.nn.functional.dropout(self.layers[0](tokens), 0.1, self.training)


def _trainer(degrees, loss_fn=next_token_loss):
    data = TextData(shakespeare()[:12_000], vocab_size=264, context_length=12, seed=2)
    size = {"num_layers": 2, "hidden_size": 24, "tie_embeddings": False}
    config = DecoderConfig(vocab_size=264, context_length=12, **size)
    model = DecoderLM(config, seed=1)
    if set(degrees) == {"dp_shard"}:
        model = _Dropping(model)
    model = parallelize(model, build_mesh(MeshConfig(**degrees)))
    return Trainer(model, data, TrainConfig(num_steps=5, global_batch_size=8, loss_fn=loss_fn))


def _longer(trainer):
    object.__setattr__(trainer.config, "num_steps", 7)
    return trainer.fit().losses


def reported(rank, all_degrees):
    """Return a report by mesh, whether the run went on as without one, and two refusals."""
    del rank
    found = {}
    for degrees in all_degrees:
        trainer, plain = _trainer(degrees), _trainer(degrees)
        plain.fit()
        expected = _longer(plain)
        trainer.fit()
        report = trainer.scaling_report(num_steps=3)
        found[str(degrees)] = (report, _longer(trainer) == expected)
    with pytest.raises(ValueError, match=r"after 7 steps, of which the first 2 do not"):
        trainer.scaling_report(num_steps=6)

    def fails_alone(logits, targets):
        if len(logits) == 4 and trainer.step == 5:
            raise MemoryError("no room")
        return next_token_loss(logits, targets)

    trainer = _trainer({"dp_shard": 2}, fails_alone)
    trainer.fit()
    with pytest.raises(NbdistError) as failed:
        trainer.scaling_report(num_steps=3)
    return found, str(failed.value)


def test_report_is_equal_on_all_ranks_and_the_run_goes_on_bit_for_bit():
    answers = run_ranks(
        reported, 2, [{"dp_shard": 2}, {"dp_shard": 1, "tp": 2}, {"dp_shard": 1, "pp": 2}]
    )

    for found, failed in answers:
        for degrees, (report, is_same) in found.items():
            assert is_same, degrees
            assert report == answers[0][0][degrees][0]
            assert (report.num_ranks, report.tokens_per_step) == (2, 8 * 12)
            assert min(report.seconds, report.seconds_alone) > 0
            assert 0 <= report.communication < 1
        assert "on rank 0 alone, but there it raised MemoryError: no room" in failed


def test_report_tells_speedup_and_efficiency():
    report = ScalingReport(
        num_ranks=4, tokens_per_step=1000, seconds=0.1, seconds_alone=0.3, communication=0.125
    )

    assert str(report) == (
        "4 ranks: 10,000 tokens/s, 100.0 ms a step; 1 rank: 3,333 tokens/s, 300.0 ms a step; "
        "speed-up 3.00, efficiency 75%, communication 12% of the time"
    )
