"""What nbdist costs in training: cells with `Trainer` against hand-written torchrun scripts.

DDP, FSDP2, tensor and pipeline parallelism; the scripts are in `peers/`. Both train the same model
on the same rows with the same number of ranks, in turns (A B A B), so that a busy machine slows
both. Wanted: at least 0.98 of the hand-written speed, each.
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
PEERS = HERE / "peers"
WANTED = 0.98
REST_SECONDS = 3
WARM_STEPS = 5  # not counted: allocations, and the first exchange of every pair of ranks

MODES = {
    "ddp": ("MeshConfig()", "True", 'strategy="ddp"'),
    "fsdp2": ("MeshConfig()", "True", ""),
    "tp": ("MeshConfig(dp_shard=1, tp=-1)", "False", ""),
    "pp": (
        "MeshConfig(dp_shard=1, pp=-1)",
        "False",
        'pipeline=PipelineConfig(schedule="1f1b", num_micro_batches=4)',
    ),
}
"""Mesh, whether the embedding is tied, and options of `parallelize`."""

CELL = """
import json
from nbdist.train import (DecoderConfig, DecoderLM, MeshConfig, PipelineConfig, TextData,
                          TrainConfig, Trainer, build_mesh, parallelize, shakespeare)

data = TextData(shakespeare())
config = DecoderConfig(vocab_size=data.vocab_size, tie_embeddings={tied})
model = parallelize(DecoderLM(config), build_mesh({mesh}), {options})
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


def measure(
    args: argparse.Namespace, mode: str, run_cell: Callable[[str], list[float]]
) -> list[dict]:
    """Run both in turns; return a round's {name: (median, fastest tenth)} tokens per second."""
    mesh, tied, options = MODES[mode]
    cell = CELL.format(
        num_steps=args.steps, batch=args.batch, mesh=mesh, tied=tied, options=options
    )
    rounds = []
    for number in range(args.rounds):
        ways = {
            "handwritten": lambda: torchrun(
                PEERS / f"{mode}.py", args.ranks, args.steps, args.batch
            ),
            "nbdist": lambda: run_cell(cell),
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
            print(f"{mode}, round {number + 1}/{args.rounds}: {shown} tokens/s", flush=True)
    return rounds


def summary(mode: str, rounds: list[dict]) -> dict[str, float | str]:
    """Return the medians over the rounds, and of the ratios of pairs that ran side by side."""
    row: dict[str, float | str] = {"mode": mode}
    for index, which in enumerate(("median", "fastest_tenth")):
        for name in ("handwritten", "nbdist"):
            row[f"{name}_{which}"] = statistics.median(found[name][index] for found in rounds)
        pairs = [found["nbdist"][index] / found["handwritten"][index] for found in rounds]
        row[f"ratio_{which}"] = round(statistics.median(pairs), 4)
    return row


def report(args: argparse.Namespace, rows: list[dict]) -> None:
    """Print the table, or one JSON object."""
    if args.json:
        given = {"ranks": args.ranks, "steps": args.steps, "rounds": args.rounds}
        print(json.dumps({"benchmark": "train", **given, "wanted_ratio": WANTED, "rows": rows}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("", "by hand, tokens/s", "nbdist", f"ratio (wanted {WANTED})", "fastest tenth")
    for row in rows:
        table.add_row(
            row["mode"],
            f"{row['handwritten_median']:,.0f}",
            f"{row['nbdist_median']:,.0f}",
            f"{row['ratio_median']:.3f}",
            f"{row['ratio_fastest_tenth']:.3f}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="*", metavar="MODE", help=f"of {', '.join(MODES)}; all")
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
    modes = args.modes or list(MODES)
    if unknown := set(modes) - set(MODES):
        parser.error(f"{', '.join(unknown)} is not known; choose of {', '.join(MODES)}")
    if args.no_world:
        with tempfile.TemporaryDirectory() as directory:
            script = Path(directory, "trainer.py")

            def run_script(source: str) -> list[float]:
                script.write_text(BEFORE + source + AFTER, encoding="utf-8")
                return torchrun(script, args.ranks)

            report(args, [summary(mode, measure(args, mode, run_script)) for mode in modes])
        return
    from nbdist import World

    with World.start(num_ranks=args.ranks, threads_per_rank=1) as world:

        def run_cell(source: str) -> list[float]:
            return last_json(world.run(source).text[0])

        report(args, [summary(mode, measure(args, mode, run_cell)) for mode in modes])


if __name__ == "__main__":
    main()
