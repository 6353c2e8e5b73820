"""The overlap report of a real trainer, which stays as it was."""

import json

import pytest
import torch

from nbdist.testing import run_ranks
from nbdist.train import (
    CommunicationConfig,
    DecoderConfig,
    DecoderLM,
    TextData,
    TrainConfig,
    Trainer,
    build_mesh,
    overlap_report,
    parallelize,
    shakespeare,
)


def _losses(directory, strategy, profiled, rank):
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=280, num_layers=2, hidden_size=32, context_length=12)
    sending = CommunicationConfig(bucket_megabytes=0.02) if strategy == "ddp" else None
    model = parallelize(DecoderLM(config), build_mesh(), strategy=strategy, communication=sending)
    data = TextData(shakespeare()[:8000], vocab_size=280, context_length=12)
    trainer = Trainer(model, data, TrainConfig(num_steps=3, global_batch_size=6))
    assert "step 0 of 3, global batch 6 = 2 ranks x 3 rows, learning rate" in repr(trainer)
    report = None
    if profiled:
        report = overlap_report(trainer, steps=2, trace=directory / f"{strategy}-{rank}.json")
        with pytest.raises(ValueError, match="steps=0 leaves nothing to profile"):
            overlap_report(trainer, steps=0)
    return report, trainer.fit().losses


def _reports(rank, directory):
    return {
        strategy: [_losses(directory, strategy, profiled, rank) for profiled in (False, True)]
        for strategy in ("ddp", "zero3")
    }


def test_report_finds_the_collectives_of_each_step_and_changes_no_number(tmp_path):
    for found in run_ranks(_reports, 2, tmp_path):
        for (_, plain), (report, losses) in found.values():
            assert losses == plain
            assert len(report.steps) == 2
            for step in report.steps:
                assert step.communication
                assert step.computation
                assert 0 <= step.fraction <= 1
            assert json.loads(report.trace.read_text())["traceEvents"]
