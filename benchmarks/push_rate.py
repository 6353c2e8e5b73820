"""Rate of push and pull of a large value: nbdist's against ipyparallel's own, same ranks.

A push counts until every rank has the value, as bytes of the value per second. A pull counts the
bytes of all ranks. The first copies of each way do not count: on a virtual machine the first
touch of memory costs more than the copy. Memory is the highest resident size of the process during
the copy, less the one before it; a pulled value itself is part of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nbdist import World

WARM_UP = 2


def _resident(pid: int | str, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _measure(call: Callable[[], Any], pids: list[int | str]) -> tuple[float, list[int]]:
    """Return seconds and the growth in bytes of each process."""
    before = []
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts at the present size
        before.append(_resident(pid, "VmRSS"))
    started = time.perf_counter()
    kept = call()
    seconds = time.perf_counter() - started
    grown = [_resident(pid, "VmHWM") - size for pid, size in zip(pids, before, strict=True)]
    del kept
    return seconds, grown


def measure(num_ranks: int, megabytes: int, repeats: int, *, alone: bool) -> list[dict[str, Any]]:
    """Return one row a way and direction."""
    value = np.random.default_rng(0).standard_normal(megabytes * 10**6 // 8)
    rows = []
    with World.start(num_ranks) as world:
        world.push(small=1)
        ranks = list(range(num_ranks))
        view = world._objects._view(ranks)
        controller = int(world.record.processes[1][0])
        ways = {
            ("push", "nbdist"): lambda: world.push(value=value),
            ("pull", "nbdist"): lambda: world.pull("value"),
            ("push", "ipyparallel"): lambda: view.push({"value": value}, block=True),
            ("pull", "ipyparallel"): lambda: view.pull("value", block=True),
        }
        if alone:
            ways = {key: call for key, call in ways.items() if key[1] == "nbdist"}
        for (direction, way), call in ways.items():
            for _ in range(WARM_UP):
                call()
            found = [_measure(call, ["self", controller]) for _ in range(repeats)]
            seconds = statistics.median(seconds for seconds, _ in found)
            best = min(seconds for seconds, _ in found)
            moved = value.nbytes * (num_ranks if direction == "pull" else 1)
            rows.append(
                {
                    "ranks": num_ranks,
                    "direction": direction,
                    "way": way,
                    "megabytes": megabytes,
                    "seconds": seconds,
                    "gb_per_second": moved / seconds / 1e9,
                    "best_gb_per_second": moved / best / 1e9,
                    "client_peak_mb": max(grown[0] for _, grown in found) / 1e6,
                    "controller_peak_mb": max(grown[1] for _, grown in found) / 1e6,
                }
            )
    return rows


def main() -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=256, help="of the value")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--alone", action="store_true", help="nbdist only: ipyparallel takes half a minute a GB"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    rows = measure(options.ranks, options.megabytes, options.repeats, alone=options.alone)
    if options.json:
        print(json.dumps({"benchmark": "push_rate", "unit": "GB/s", "rows": rows}))
        return
    print(f"{options.megabytes} MB, {options.ranks} ranks; wanted: nbdist's push at 1 GB/s or more")
    print("     way               s   GB/s   best  client MB  controller MB")
    for row in rows:
        print(
            f"{row['direction']:>4} {row['way']:>11} {row['seconds']:7.3f} "
            f"{row['gb_per_second']:6.2f} {row['best_gb_per_second']:6.2f} "
            f"{row['client_peak_mb']:10.0f} {row['controller_peak_mb']:14.0f}"
        )


if __name__ == "__main__":
    main()
