"""What can only be seen on GPUs, in one run: start, NCCL, training, serving, a freed collective.

Each line is a check with its time; the exit code is the number of failed ones. Without a CUDA
device it says so and ends with 0 checks and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

from nbdist import World
from nbdist.cluster.config import count_gpus
from nbdist.errors import NbdistError

SUM = """
import torch, torch.distributed as dist
x = torch.full((1024,), float(rank + 1), device=device); dist.all_reduce(x)
assert float(x[0]) == world_size * (world_size + 1) / 2, x[0]
"""
TRAIN = """
from nbdist.train import DecoderConfig, DecoderLM, TextData, TrainConfig, Trainer, shakespeare
data = TextData(shakespeare())
model = DecoderLM(DecoderConfig.tiny(data.vocab_size)).to(device)
history = Trainer(model, data, TrainConfig(num_steps=50)).fit()
assert history.losses[-1] < history.losses[0] - 1, history
print(round(sorted(r.tokens_per_second for r in history.records)[25]))
"""
SERVE = "from nbdist.serve import serve; serve(model, data.tokenizer)"
STUCK = """
if rank == 1: raise ValueError("meant to fail")
x = torch.ones(1, device=device); dist.all_reduce(x); torch.cuda.synchronize()
"""


def checks(world: World) -> dict[str, Callable[[], object]]:
    """Return the checks by name, in order."""

    def freed() -> object:
        if world.num_ranks < 2:
            return "skipped: one GPU"
        try:
            world.run(STUCK, timeout_seconds=60)
        except NbdistError as error:
            return str(error)[:80]
        raise AssertionError("the cell should have failed")

    def answers() -> object:
        from nbdist.serve import generate

        world.run(SERVE)
        found = generate(world, ["ROMEO:", "The king"] * 8, max_new_tokens=64, seed=0)
        return f"{sum(a.num_tokens for a in found)} tokens"

    return {
        "devices": lambda: [f"{i.device} {i.device_name}" for i in world.infos],
        "all_reduce over NCCL": lambda: world.run(SUM) and "ok",
        "training, tokens/s": lambda: world.run(TRAIN).text[0].strip().splitlines()[-1],
        "serving": answers,
        "blocked NCCL collective freed": freed,
        "next cell runs": lambda: world.run("print(rank)").text,
    }


def main() -> int:
    """Run the checks; returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="default: one per GPU")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    if not count_gpus():
        print("no NVIDIA GPU is visible here: nothing was checked", file=sys.stderr)
        return 2
    rows = []
    started = time.perf_counter()
    with World.start(options.ranks) as world:
        rows.append(("start", time.perf_counter() - started, True, f"{world.num_ranks} ranks"))
        for name, check in checks(world).items():
            began = time.perf_counter()
            try:
                passed, shown = True, check()
            except (NbdistError, AssertionError) as error:
                passed, shown = False, str(error)[:200]
            rows.append((name, time.perf_counter() - began, passed, str(shown)))
    if options.json:
        print(json.dumps({"benchmark": "gpu_check", "rows": rows}))
    else:
        for name, seconds, passed, shown in rows:
            print(f"{'ok  ' if passed else 'FAIL'} {seconds:7.2f} s  {name}: {shown}")
    return sum(not passed for _, _, passed, _ in rows)


if __name__ == "__main__":
    raise SystemExit(main())
