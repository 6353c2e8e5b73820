"""Bytes a step and steps to a loss of every way to send gradients, against plain DDP.

Two ranks train a small decoder on the Shakespeare corpus from the same start with the same rows.
Steps to the loss are counted on the mean of the last 10 steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from statistics import fmean
from typing import Any

import torch

from nbdist.testing import run_ranks
from nbdist.train import (
    CommunicationConfig,
    DecoderConfig,
    DecoderLM,
    TextData,
    TrainConfig,
    Trainer,
    WireCounter,
    build_mesh,
    parallelize,
    shakespeare,
)

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"compression": "fp16"},
    "powersgd": {"compression": "powersgd", "powersgd_rank": 4},
    "onebit": {"compression": "onebit"},
}


def train(rank: int, way: str, num_steps: int, warmup_steps: int) -> tuple[list[float], int]:
    torch.manual_seed(0)
    data = TextData(shakespeare(), vocab_size=512, context_length=64)
    config = DecoderConfig(
        vocab_size=data.vocab_size, num_layers=2, hidden_size=64, context_length=64
    )
    mesh = build_mesh()
    sending = CommunicationConfig(warmup_steps=warmup_steps, **WAYS[way])
    model = parallelize(DecoderLM(config), mesh, strategy="ddp", communication=sending)
    trainer = Trainer(model, data, TrainConfig(num_steps=num_steps), mesh=mesh)
    with WireCounter() as wire:
        losses = trainer.fit().losses
    return [*losses, trainer.evaluate()], wire.total


def smooth(losses: list[float]) -> list[float]:
    return [fmean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--warmup", type=int, default=24, help="plain steps of powersgd and onebit")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    goal, plain_bytes = 0.0, 0
    for way in dict.fromkeys(["plain", *options.ways]):  # the others are compared with it
        found = run_ranks(train, 2, way, options.steps, options.warmup, timeout_seconds=900)
        (*losses, validation), sent = found[0]
        smoothed = smooth(losses)
        if way == "plain":
            goal, plain_bytes = smoothed[-options.steps // 10], sent
        reached = next((i + 1 for i, loss in enumerate(smoothed) if loss <= goal), None)
        row = {"way": way, "bytes_a_step": sent / options.steps, "of_plain": sent / plain_bytes}
        row |= {"goal": goal, "steps_to_goal": reached, "final": smoothed[-1]}
        rows.append(row | {"validation": validation})
        if not options.json:
            print(
                f"{way:9} {sent / options.steps:9,.0f} bytes a step ({sent / plain_bytes:.3f}), "
                f"{reached} steps to {goal:.3f}, final {smoothed[-1]:.3f}, "
                f"validation {validation:.3f}",
                flush=True,
            )
    if options.json:
        print(json.dumps({"benchmark": "compression", "unit": "bytes", "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
