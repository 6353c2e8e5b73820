"""Random faults, one after another, over one world that must outlive them all.

`NBDIST_FAULTS=200 python -m pytest tests/cluster/faults` runs 200; the default is short. The
seed is `NBDIST_FAULTS_SEED`; a failure names the seed, the number and the fault.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from nbdist import World
from nbdist.errors import NbdistError

NUM_FAULTS = int(os.environ.get("NBDIST_FAULTS", "14"))
SEED = int(os.environ.get("NBDIST_FAULTS_SEED", "0"))
NUM_RANKS = 2
STEPS = 3

# Every fault runs in a loop of steps, each with a collective; it strikes at (rank, step).
LOOP = """
import os, time, asyncio, ctypes, torch, torch.distributed as dist
for step in range({steps}):
    x = torch.ones(4) * (rank + 1)
    dist.all_reduce(x)
    if step == {step}:
        if rank == {rank}:
            {fault}
        {others}
"""
BARRIER = "dist.barrier()"


@dataclass(frozen=True)
class Fault:
    """What strikes, and within how many seconds its cell must have ended."""

    source: str
    within_seconds: float
    others: str = BARRIER
    interrupt: bool = False


FAULTS = {
    "raises before a barrier": Fault("raise ValueError('boom')", 4),
    "raises before an all_reduce": Fault("raise ValueError", 4, "dist.all_reduce(x)"),
    "raises before a recv": Fault(
        "raise ValueError", 4, "dist.recv(x, {rank}) if rank != {rank} else None"
    ),
    "exits": Fault("os._exit(3)", 4),
    "is killed": Fault("os.kill(os.getpid(), 9)", 4),
    "segfaults": Fault("ctypes.string_at(0)", 4),
    "aborts": Fault("os.abort()", 4),
    "stopped in a loop": Fault("\n            while True: pass", 3, interrupt=True),
    "stopped in sleep": Fault("time.sleep(600)", 3, interrupt=True),
    "stopped in await": Fault("await asyncio.sleep(600)", 3, interrupt=True),
    "all stopped in sleep": Fault("pass", 4, "time.sleep(600)", interrupt=True),
    "other shape": Fault("dist.all_reduce(torch.ones(9))", 5, "dist.all_reduce(x)"),
    "other dtype": Fault("dist.all_reduce(x.double())", 5, "dist.all_reduce(x)"),
    "other operation": Fault("dist.all_reduce(x)", 5, "dist.broadcast(x, 0)"),
    "other size in a broadcast": Fault(
        "dist.broadcast(torch.ones(6), 0)", 5, "dist.broadcast(x, 0)"
    ),
}


def strike(world: World, fault: Fault, rank: int, step: int) -> tuple[BaseException | None, float]:
    """Run the loop with the fault; return what the cell ended with and its seconds."""
    source = LOOP.format(
        steps=STEPS,
        rank=rank,
        step=step,
        fault=fault.source,
        others=("pass" if rank is None else fault.others.format(rank=rank)),
    )
    stopped_at = [0.0]

    def stop() -> None:
        stopped_at[0] = time.monotonic()
        world.interrupt()

    timer = threading.Timer(0.7, stop)
    if fault.interrupt:
        timer.start()
    started = time.monotonic()
    try:
        world.run(source)
    except (NbdistError, KeyboardInterrupt) as error:
        return error, time.monotonic() - max(started, stopped_at[0])
    finally:
        timer.cancel()
    return None, time.monotonic() - started


def check(world: World, number: int, expected: Callable[[int], object]) -> None:
    """The world answers, sums rightly, and survivors have kept their names."""
    total = "x = torch.ones(1) * (rank + 1); dist.all_reduce(x); print(int(x), kept)"
    found = world.run("import torch, torch.distributed as dist\n" + total).text
    assert found == {r: f"3 {expected(r)}\n" for r in range(NUM_RANKS)}, (number, found)


@pytest.mark.timeout(60 + 10 * NUM_FAULTS)
def test_world_outlives_random_faults():
    chooser = random.Random(SEED)
    names = list(FAULTS)
    seconds: dict[str, list[float]] = {}
    with World.start(NUM_RANKS) as world:
        world.run("kept = rank * 1000")
        for number in range(NUM_FAULTS):
            name = names[number] if number < len(names) else chooser.choice(names)
            fault, rank, step = FAULTS[name], chooser.randrange(NUM_RANKS), chooser.randrange(STEPS)
            where = f"seed {SEED}, fault {number} ({name} on rank {rank} at step {step})"

            error, took = strike(world, fault, rank, step)

            assert error is not None, f"{where}: the cell ended as if nothing had happened"
            assert took < fault.within_seconds, f"{where}: {took:.1f} s"
            seconds.setdefault(name, []).append(took)
            for lost in world.heal() if world.lost_ranks else []:
                world.run("kept = rank * 1000", ranks=[lost])
            check(world, number, lambda r: r * 1000)
    rows = [
        f"{name:28} {len(times):3} times, median {sorted(times)[len(times) // 2]:.2f} s, "
        f"longest {max(times):.2f} s"
        for name, times in seconds.items()
    ]
    sys.stdout.write("\n" + "\n".join(rows) + "\n")
