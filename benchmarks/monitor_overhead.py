"""What the check of collectives costs: the same cells on a world with it and on one without.

Both worlds live side by side and take turns, so that a busy machine slows both. Wanted: less than
0.2 ms a small all_reduce and less than 1% of a training step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics

from nbdist import World

SWITCH = "NBDIST_COLLECTIVE_CHECK"
WANTED_MS = 0.2
WANTED_FRACTION = 0.01

SETUP = """
import json, statistics, time, torch, torch.distributed as dist
from nbdist.train import DecoderConfig, DecoderLM, TextData, TrainConfig, Trainer, shakespeare
torch.manual_seed(0)
data = TextData(shakespeare())
small = torch.ones(256)
trainer = Trainer(DecoderLM(DecoderConfig.tiny(data.vocab_size)), data,
                  TrainConfig(num_steps=10**6))
"""
REDUCE = """
times = []
for _ in range(%d):
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(small)
    times.append(time.perf_counter() - began)
print(json.dumps(times))
"""
STEP = """
import contextlib, io
began = trainer.step
object.__setattr__(trainer.config, "num_steps", began + %d)
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    trainer.fit()
print(json.dumps([r.seconds for r in trainer.history.records][-%d:]))
"""


def main() -> None:
    """Measure and print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--reduces", type=int, default=400, help="all_reduces a round")
    parser.add_argument("--steps", type=int, default=8, help="training steps a round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seen = measure(options)
    if options.json:
        print(json.dumps(seen))
        return
    print(f"{'':24}{'without':>12}{'with':>12}{'more':>12}{'wanted':>12}")
    for name, wanted in (("all_reduce", f"{WANTED_MS} ms"), ("step", f"{WANTED_FRACTION:.0%}")):
        off, on = seen[name]["off_ms"], seen[name]["on_ms"]
        more = f"{on - off:+.3f} ms" if name == "all_reduce" else f"{seen[name]['ratio'] - 1:+.2%}"
        print(f"{name + ', median':24}{off:>9.3f} ms{on:>9.3f} ms{more:>12}{'<' + wanted:>12}")


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return medians in ms of both, and the median over rounds of their ratio."""
    os.environ[SWITCH] = "0"
    off = World.start(options.ranks)
    os.environ[SWITCH] = "1"
    with off, World.start(options.ranks) as on:
        cells = {
            "all_reduce": REDUCE % options.reduces,
            "step": STEP % (options.steps, options.steps),
        }
        for world in (off, on):
            world.run(SETUP)
            for cell in cells.values():
                world.run(cell)
        return {name: _turns(off, on, cell, options.rounds) for name, cell in cells.items()}


def _turns(off: World, on: World, cell: str, rounds: int) -> dict[str, float]:
    medians: dict[World, list[float]] = {off: [], on: []}
    for number in range(rounds):
        for world in (off, on) if number % 2 else (on, off):
            text = world.run(cell).text[0]
            medians[world].append(statistics.median(json.loads(text.strip().splitlines()[-1])))
    ratios = [a / b for a, b in zip(medians[on], medians[off], strict=True)]
    return {
        "off_ms": statistics.median(medians[off]) * 1e3,
        "on_ms": statistics.median(medians[on]) * 1e3,
        "ratio": statistics.median(ratios),
    }


if __name__ == "__main__":
    main()
