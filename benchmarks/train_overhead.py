"""What nbdist costs in training: a cell with `Trainer` against a hand-written torchrun script.

Both train the same model on the same rows with the same number of ranks, in turns (A B A B), so
that a busy machine slows both. Wanted: at least 0.98 of the hand-written speed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
HANDWRITTEN = HERE / "train_handwritten.py"
WANTED = 0.98
REST_SECONDS = 3
WARM_STEPS = 5  # not counted: allocations, and the first exchange of every pair of ranks

CELL = """
import json
from nbdist.train import DecoderConfig, DecoderLM, TextData, TrainConfig, Trainer, shakespeare

data = TextData(shakespeare())
model = DecoderLM(DecoderConfig.tiny(data.vocab_size))
trainer = Trainer(model, data, TrainConfig(num_steps={num_steps}, global_batch_size={batch}))
history = trainer.fit()
if trainer.mesh.get_rank() == 0:
    print(json.dumps([record.tokens_per_second for record in history.records]), flush=True)
"""

# what a %%distributed cell finds ready, for `--no-world`
BEFORE = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.set_num_threads(1)
"""
AFTER = """
import os
dist.barrier()
os._exit(0)
"""


def torchrun(script: Path, num_ranks: int, *args: int) -> list[float]:
    """Run a script on several ranks; return its last line of output, parsed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", str(script), *map(str, args)]
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{script} failed with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return last_json(done.stdout)


def last_json(text: str) -> list[float]:
    return json.loads([line for line in text.splitlines() if line.startswith("[")][-1])


def measure(args: argparse.Namespace, run_cell: Callable[[str], list[float]]) -> list[dict]:
    """Run both in turns; return a round's {name: (median, fastest tenth)} tokens per second."""
    rounds = []
    for number in range(args.rounds):
        ways = {
            "handwritten": lambda: torchrun(HANDWRITTEN, args.ranks, args.steps, args.batch),
            "nbdist": lambda: run_cell(CELL.format(num_steps=args.steps, batch=args.batch)),
        }
        # The order turns round by round, and the machine rests as long before either.
        order = list(ways) if number % 2 else list(reversed(ways))
        steps = {}
        for name in order:
            time.sleep(REST_SECONDS)
            steps[name] = ways[name]()
        rounds.append(
            {
                name: (statistics.median(found), statistics.quantiles(found, n=10)[-1])
                for name, found in ((name, all_[WARM_STEPS:]) for name, all_ in steps.items())
            }
        )
        if not args.json:
            shown = ", ".join(f"{name} {median:,.0f}" for name, (median, _) in rounds[-1].items())
            print(f"round {number + 1}/{args.rounds}: {shown} tokens/s", flush=True)
    return rounds


def report(args: argparse.Namespace, rounds: list[dict]) -> None:
    def middle(name: str, which: int) -> float:
        return statistics.median(found[name][which] for found in rounds)

    def ratio(which: int) -> float:
        # of pairs that ran next to each other, so slow drifts of the machine cancel
        pairs = (found["nbdist"][which] / found["handwritten"][which] for found in rounds)
        return round(statistics.median(pairs), 4)

    result = {
        "benchmark": "train_overhead",
        "through": "torchrun" if args.no_world else "world",
        "ranks": args.ranks,
        "steps": args.steps,
        "rounds": args.rounds,
        "global_batch_size": args.batch,
        "handwritten_tokens_per_second": round(middle("handwritten", 0)),
        "nbdist_tokens_per_second": round(middle("nbdist", 0)),
        "ratio": ratio(0),
        "ratio_of_fastest_tenth": ratio(1),
        "wanted_ratio": WANTED,
    }
    if args.json:
        print(json.dumps(result))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("", "median step, tokens/s", "fastest tenth, tokens/s")
    for name, shown in (
        ("handwritten", "hand-written, torchrun"),
        ("nbdist", f"nbdist Trainer, {result['through']}"),
    ):
        table.add_row(shown, f"{middle(name, 0):,.0f}", f"{middle(name, 1):,.0f}")
    table.add_row(f"ratio of pairs (wanted {WANTED})", f"{ratio(0):.3f}", f"{ratio(1):.3f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps a round")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs")
    parser.add_argument("--batch", type=int, default=16, help="rows a step, over all ranks")
    parser.add_argument("--no-world", action="store_true", help="Trainer under torchrun, no cell")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    args = parser.parse_args()
    if args.steps <= WARM_STEPS:
        parser.error(f"--steps {args.steps} leaves none to count; set more than {WARM_STEPS}")
    if args.no_world:
        with tempfile.TemporaryDirectory() as directory:
            script = Path(directory, "trainer.py")

            def run_cell(source: str) -> list[float]:
                script.write_text(BEFORE + source + AFTER, encoding="utf-8")
                return torchrun(script, args.ranks)

            report(args, measure(args, run_cell))
        return
    from nbdist import World

    with World.start(num_ranks=args.ranks, threads_per_rank=1) as world:
        report(args, measure(args, lambda source: last_json(world.run(source).text[0])))


if __name__ == "__main__":
    main()
