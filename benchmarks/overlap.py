"""Share of communication under computation, by bucket size of DDP and by prefetch of FSDP.

The ways take turns in one world; a number is the median over all turns and ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from statistics import median

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
from nbdist.train.parallelize.record import Strategy

WAYS: dict[str, tuple[Strategy, CommunicationConfig]] = {
    f"ddp, buckets of {size} MB": ("ddp", CommunicationConfig(bucket_megabytes=size))
    for size in (0.25, 1.0, 4.0, 25.0)
}
WAYS |= {
    f"zero3, prefetch {ahead}": ("zero3", CommunicationConfig(prefetch=ahead))
    for ahead in (None, 1, 2)
}


def measure(rank: int, turns: int) -> tuple[dict[str, list[tuple[float, ...]]], dict[str, str]]:
    data = TextData(shakespeare(), vocab_size=512, context_length=64)
    config = DecoderConfig(
        vocab_size=data.vocab_size, num_layers=4, hidden_size=128, context_length=64
    )
    train = TrainConfig(num_steps=1, global_batch_size=16)
    trainers = {}
    for way, (strategy, sending) in WAYS.items():
        model = parallelize(
            DecoderLM(config), build_mesh(), strategy=strategy, communication=sending
        )
        trainers[way] = Trainer(model, data, train)
    found: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    shown = {}
    for _ in range(turns):
        for way, trainer in trainers.items():
            torch.distributed.barrier()
            report = overlap_report(trainer, steps=3)
            for step in report.steps:
                begin, end = step.span
                travelled = sum(b - a for a, b in step.communication)
                found[way].append((step.fraction, (end - begin) / 1e3, travelled / 1e3))
            shown[way] = report.steps[-1].timeline()
    return found, shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    results = run_ranks(measure, 2, options.turns, timeout_seconds=600)
    rows = []
    for way in WAYS:
        steps = [step for found, _ in results for step in found[way]]
        fraction, step_ms, traffic_ms = (median(column) for column in zip(*steps, strict=True))
        rows.append({"way": way, "overlap": fraction, "step": step_ms, "traffic": traffic_ms})
        if not options.json:
            print(
                f"{way:24} {fraction:4.0%} of {traffic_ms:5.1f} ms in a step of {step_ms:6.1f} ms\n"
                f"{results[0][1][way]}"
            )
    if options.json:
        print(json.dumps({"benchmark": "overlap", "unit": "ms", "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
