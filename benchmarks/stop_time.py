"""Time from Stop to the end of the cell, on two ranks, whatever the cell does."""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time

from nbdist import World

SETUP = """
import time, asyncio, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
x = torch.ones(4)
class Numbers(Dataset):
    def __len__(self): return 10**9
    def __getitem__(self, i): time.sleep(0.001); return torch.ones(2)
"""
CELLS = {
    "loop": "print('on')\nwhile True: pass",
    "sleep": "print('on')\ntime.sleep(600)",
    "await": "print('on')\nawait asyncio.sleep(600)",
    "barrier": "print('on')\nif rank == 0: dist.barrier()\nwhile True: pass",
    "all_reduce": "print('on')\nif rank == 1: dist.all_reduce(x)\ntime.sleep(600)",
    "recv": "print('on')\ndist.recv(x, 1 - rank)",
    "loader": "for batch in DataLoader(Numbers(), batch_size=4, num_workers=2): print('on')",
    "persistent loader": "loader = DataLoader(Numbers(), num_workers=2, persistent_workers=True)\n"
    "for batch in loader: print('on')",
}
DELAY_SECONDS = 0.3


def stop_once(world: World, source: str) -> float:
    """Run a cell, stop it a moment after its first output, and return the seconds from there."""
    stopped_at: list[float] = []

    def stop() -> None:
        stopped_at.append(time.monotonic())
        world.interrupt()

    timer: threading.Timer | None = None
    try:
        for event in world.stream(source):
            if timer is None and getattr(event, "text", "").strip():
                timer = threading.Timer(DELAY_SECONDS, stop)
                timer.start()
    except KeyboardInterrupt:
        return time.monotonic() - stopped_at[0]
    raise RuntimeError(f"{source!r} was stopped but ended otherwise")


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Return the median and the longest time of each cell, and of the cell that follows it."""
    rows = {}
    with World.start(2) as world:
        world.run(SETUP)
        for name, source in CELLS.items():
            stops, following = [], []
            for _ in range(repeats):
                stops.append(stop_once(world, source))
                started = time.monotonic()
                world.run("pass")
                following.append(time.monotonic() - started)
            rows[name] = {
                "median": statistics.median(stops),
                "longest": max(stops),
                "next_cell": max(following),
            }
    return rows


def main() -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    rows = measure(options.repeats)
    if options.json:
        print(json.dumps({"benchmark": "stop_time", "unit": "s", **rows}))
        return
    print(f"s over {options.repeats} stops of each cell, 2 ranks; wanted: at most 2")
    for name, row in rows.items():
        print(
            f"  {name:18} median {row['median']:.2f}, longest {row['longest']:.2f}, "
            f"next cell at most {row['next_cell']:.2f}"
        )


if __name__ == "__main__":
    main()
