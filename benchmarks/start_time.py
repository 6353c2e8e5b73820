"""Time from nothing to a verified collective: `World.start(2)` against `torchrun`.

Both are whole processes: a fresh interpreter that starts two ranks, does one all_reduce on each
and says so; the clock stops at that line. They take turns.
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

TORCHRUN_SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1); dist.all_reduce(x)
assert int(x) == dist.get_world_size()
if dist.get_rank() == 0: print("READY", flush=True)
dist.destroy_process_group()
"""
# What a notebook has loaded by then: `%load_ext nbdist` comes before `%distributed start`.
NBDIST_SCRIPT = """
import sys, time
from nbdist import World
print("LOADED", flush=True)
world = World.start({n})
print("READY", flush=True)
world.stop()
"""


def until(command: list[str], mark: str, start_mark: str | None = None) -> float:
    """Return seconds from the start of a command, or from a line it prints, to another line."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout is not None
    seconds = 0.0
    for line in process.stdout:
        if start_mark and line.strip() == start_mark:
            started = time.perf_counter()
        if line.strip() == mark:
            seconds = time.perf_counter() - started
    _, errors = process.communicate()
    if not seconds:
        raise RuntimeError(f"{command} never printed {mark}: {errors[-2000:]}")
    return seconds


def measure(num_ranks: int, repeats: int) -> dict[str, object]:
    """Return medians and ratios; the first turn warms the file cache and is not counted."""
    times: dict[str, list[float]] = {"torchrun": [], "nbdist": [], "nbdist_process": []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "all_reduce.py"
        script.write_text(TORCHRUN_SCRIPT)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        torchrun += [str(num_ranks), "--standalone", str(script)]
        nbdist = [sys.executable, "-c", NBDIST_SCRIPT.format(n=num_ranks)]
        for turn in range(repeats + 1):
            found = {
                "torchrun": until(torchrun, "READY"),
                "nbdist": until(nbdist, "READY", "LOADED"),
                "nbdist_process": until(nbdist, "READY"),
            }
            if turn:
                for which, seconds in found.items():
                    times[which].append(seconds)
    medians = {which: statistics.median(values) for which, values in times.items()}
    pairs = zip(times["nbdist"], times["torchrun"], strict=True)
    return {
        "ranks": num_ranks,
        "repeats": repeats,
        **medians,
        "ratio": statistics.median(a / b for a, b in pairs),
        "process_ratio": medians["nbdist_process"] / medians["torchrun"],
    }


def main() -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    row = measure(options.ranks, options.repeats)
    if options.json:
        print(json.dumps({"benchmark": "start_time", "unit": "s", **row}))
        return
    print(f"median s over {row['repeats']} turns, {row['ranks']} ranks; wanted: ratio at most 1.0")
    print(f"  torchrun, process start to first all_reduce      {row['torchrun']:.2f}")
    print(f"  World.start (nbdist loaded, as in a notebook)    {row['nbdist']:.2f}")
    print(f"  the same with interpreter start and import       {row['nbdist_process']:.2f}")
    print(f"  ratio {row['ratio']:.2f}, with interpreter and import {row['process_ratio']:.2f}")


if __name__ == "__main__":
    main()
