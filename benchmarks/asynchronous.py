"""Loss and bytes of local steps and of a parameter server, against synchronous training.

All ways train a small decoder on the Shakespeare corpus from the same start and see as many rows.
Two ranks compute; the server is a third. In the uneven world one worker computes every forward
three times, as a slower machine would.
"""

from __future__ import annotations

import argparse
import json
import sys
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

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
    next_token_loss,
    parallelize,
    scale_learning_rate,
    shakespeare,
    train_asynchronously,
)
from nbdist.train.optim import validation_loss

BATCH = 16
LOCAL = {"local SGD": (1.0, 0.0), "DiLoCo": (0.7, 0.9)}  # outer learning rate and momentum


class SlowDecoder(DecoderLM):
    """Computes three times for one result."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """As `DecoderLM.forward`."""
        for _ in range(2):
            super().forward(tokens)
        output: torch.Tensor = super().forward(tokens)
        return output


def start(kind: type[DecoderLM] = DecoderLM) -> tuple[DecoderLM, TextData]:
    torch.manual_seed(0)
    data = TextData(shakespeare(), vocab_size=512, context_length=64)
    config = DecoderConfig(
        vocab_size=data.vocab_size, num_layers=2, hidden_size=64, context_length=64
    )
    return kind(config), data


def in_step(rank: int, num_steps: int, way: str, every: int | None) -> dict[str, Any]:
    model, data = start()
    rate, momentum = LOCAL.get(way, (1.0, 0.0))
    sending = CommunicationConfig(
        local_steps=every, outer_learning_rate=rate, outer_momentum=momentum
    )
    spread = parallelize(model, build_mesh(), strategy="ddp", communication=sending)
    trainer = Trainer(spread, data, TrainConfig(num_steps=num_steps, global_batch_size=BATCH))
    with WireCounter() as wire:
        losses = trainer.fit().losses
    return {"final": fmean(losses[-10:]), "validation": trainer.evaluate(), "bytes": wire.total}


def with_server(rank: int, num_steps: int, uneven: bool) -> dict[str, Any]:
    model, data = start(SlowDecoder if uneven and rank == 2 else DecoderLM)
    workers = dist.get_world_size() - 1
    config = TrainConfig(
        num_steps=num_steps * workers,
        global_batch_size=BATCH,
        learning_rate=scale_learning_rate(3e-3, base_batch=BATCH, batch=BATCH // workers),
        warmup_steps=20 * workers,
    )
    history = train_asynchronously(model, data, config)
    rows = data.for_rank(global_batch_size=BATCH, rank=rank, world_size=dist.get_world_size())
    by_worker = {
        worker: sum(update.worker == worker for update in history.updates)
        for worker in range(1, workers + 1)
    }
    return {
        "final": fmean(history.losses[-10 * workers :]),
        "validation": validation_loss(model, rows, next_token_loss, torch.device("cpu")),
        # of one worker: it pushes all gradients for each of its updates
        "bytes": 4 * sum(p.numel() for p in model.parameters()) * num_steps,
        "staleness": history.staleness,
        "updates": by_worker,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=384, help="a multiple of every --every")
    parser.add_argument("--every", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    ways: list[tuple[str, Any, int, tuple[Any, ...]]] = [("DDP", in_step, 2, ("DDP", None))]
    ways += [(f"{way}, H={h}", in_step, 2, (way, h)) for way in LOCAL for h in options.every]
    ways += [("server", with_server, 3, (False,)), ("server, uneven", with_server, 3, (True,))]
    rows = []
    for name, function, world_size, arguments in ways:
        found = run_ranks(function, world_size, options.steps, *arguments, timeout_seconds=900)
        rows.append({"way": name} | found[0])
        if not options.json:
            row = rows[-1]
            print(
                f"{name:18} {row['bytes'] / options.steps:9,.0f} bytes a step, final "
                f"{row['final']:.3f}, validation {row['validation']:.3f} "
                f"{row.get('staleness', '')} {row.get('updates', '')}",
                flush=True,
            )
    if options.json:
        print(json.dumps({"benchmark": "asynchronous", "unit": "nats", "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
