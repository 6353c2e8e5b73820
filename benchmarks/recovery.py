"""Ranks are killed while they train: does the run end as the unbroken one, how soon does it go on?

Every run trains the same small decoder in a cell with `on_failure="heal"`; one rank is killed at
a seeded step, in forward, backward, the optimizer or a save. Compared bit for bit is the loss of
every step. Paired with torchrun, which ends all processes and starts them again from the newest
checkpoint on disk (`--max-restarts`), on the same kills.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from nbdist import World

HERE = Path(__file__).parent
PHASES = ("forward", "backward", "optimizer", "save")
NUM_STEPS = 14
SPARE_SECONDS = 120.0

SETUP = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from recovery_ranks import build
"""
FIT = """
import json
trainer = build(strategy={strategy!r}, phase={phase!r}, step={step}, victim={victim},
                directory={directory!r}, num_steps={num_steps}, on_failure="heal")
history = trainer.fit()
print(json.dumps(history.losses))
"""


@dataclass(slots=True)
class Kill:
    """One run with one death; times in seconds after the kill."""

    strategy: str
    num_ranks: int
    phase: str
    step: int
    victim: int
    is_equal: bool = False
    detected: float = 0.0
    freed: float = 0.0
    replaced: float = 0.0
    grouped: float = 0.0
    restored: float = 0.0
    first_step: float = 0.0
    steps_lost: int = 0


def losses_of(text: str) -> list[float]:
    """Return the losses that a rank has printed last."""
    found = re.findall(r"^\[.*\]$", text, re.MULTILINE)
    losses: list[float] = json.loads(found[-1])
    return losses


def run_kill(world: World, kill: Kill, directory: Path, expected: list[float]) -> None:
    """Train once with a death and note what was seen."""
    directory.mkdir()
    source = FIT.format(
        strategy=kill.strategy, phase=kill.phase, step=kill.step, victim=kill.victim,
        directory=str(directory), num_steps=NUM_STEPS,
    )  # fmt: skip
    (directory / "armed").touch()
    before = len(world.incidents)
    text = ""
    for event in world.stream(source, timeout_seconds=180):
        if event is not None and event.kind == "stream" and event.rank == 0:
            text += event.text
    (incident,) = world.incidents[before:]
    killed_at = float((directory / "killed").read_text())
    kill.is_equal = losses_of(text) == expected
    kill.detected = incident.at - killed_at
    kill.replaced = kill.detected + incident.replaced_seconds
    kill.grouped = kill.detected + incident.group_seconds
    kill.restored = kill.detected + incident.seconds
    kill.freed = kill.detected + incident.freed_seconds
    kill.first_step = float((directory / "stepped").read_text()) - killed_at
    kill.steps_lost = incident.steps_lost


def run_world(num_ranks: int, kills: list[Kill], spares: int, root: Path) -> None:
    """Run the kills of one number of ranks over one world."""
    with World.start(num_ranks, spares=spares) as world:
        world.run(SETUP)
        expected = {}
        for strategy in sorted({kill.strategy for kill in kills}):
            place = root / f"unbroken-{num_ranks}-{spares}-{strategy}"
            place.mkdir()
            source = FIT.format(strategy=strategy, phase="", step=-1, victim=-1,
                                directory=str(place), num_steps=NUM_STEPS)  # fmt: skip
            expected[strategy] = losses_of(world.run(source).text[0])
        for index, kill in enumerate(kills):
            deadline = time.monotonic() + SPARE_SECONDS
            while spares and world.num_spares_ready < spares and time.monotonic() < deadline:
                time.sleep(0.05)
            run_kill(world, kill, root / f"{num_ranks}-{spares}-{index}", expected[kill.strategy])
            end = "equal" if kill.is_equal else "DIFFERS"
            where = f"{kill.strategy}, {kill.phase} of step {kill.step + 1}, rank {kill.victim}"
            text = f"  {num_ranks} ranks, {where}: {end}, first step {kill.first_step:.2f} s"
            print(text, file=sys.stderr, flush=True)


def run_torchrun(kill: Kill, directory: Path) -> float:
    """Run a kill under torchrun; return the seconds from the kill to the end of the next step."""
    directory.mkdir()
    (directory / "armed").touch()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=2",
        f"--nproc-per-node={kill.num_ranks}", str(HERE / "recovery_ranks.py"), kill.strategy,
        kill.phase, str(kill.step), str(kill.victim), str(directory), str(NUM_STEPS),
    ]  # fmt: skip
    paths = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=240)
    return float((directory / "stepped").read_text()) - float((directory / "killed").read_text())


def make_kills(number: int, seed: int) -> list[Kill]:
    """Return seeded kills over strategies, numbers of ranks and phases, each as often."""
    draw = random.Random(seed)
    kills = []
    for index in range(number):
        num_ranks = 2 + index % 2
        kills.append(
            Kill(
                strategy=("zero3", "ddp")[index // 2 % 2],
                num_ranks=num_ranks,
                phase=PHASES[index // 4 % 4] if index < 16 else draw.choice(PHASES),
                step=draw.randrange(2, NUM_STEPS - 3),
                victim=draw.randrange(num_ranks),
            )
        )
    return kills


def summary(kills: list[Kill]) -> dict[str, object]:
    """Return medians and longest times."""
    row: dict[str, object] = {
        "runs": len(kills),
        "equal": sum(kill.is_equal for kill in kills),
        "steps_done_again": max(kill.steps_lost for kill in kills),
    }
    for name in ("detected", "freed", "replaced", "grouped", "restored", "first_step"):
        times = [getattr(kill, name) for kill in kills]
        row[name] = (statistics.median(times), max(times))
    return row


def main() -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", type=int, default=4, help="kills repeated under torchrun")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    rows: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for title, spares in (("without spare", 0), ("with a spare", 1)):
            kills = make_kills(options.kills, options.seed)
            for num_ranks in sorted({kill.num_ranks for kill in kills}):
                mine = [kill for kill in kills if kill.num_ranks == num_ranks]
                run_world(num_ranks, mine, spares, root)
            rows[title] = summary(kills)
        peers = make_kills(options.peers, options.seed)
        times = [run_torchrun(k, root / f"peer-{i}") for i, k in enumerate(peers)]
        if times:
            longest = (statistics.median(times), max(times))
            rows["torchrun"] = {"runs": len(times), "first_step": longest}
    if options.json:
        print(json.dumps(rows))
        return
    print("seconds after the kill, median and longest; wanted: first step 3.5, 1 with a spare")
    for title, row in rows.items():
        assert isinstance(row, dict)
        print(f"{title}: {row['runs']} runs" + (
            f", {row['equal']} end as the unbroken one, steps done again: at most "
            f"{row['steps_done_again']}" if "equal" in row else ""))  # fmt: skip
        for key, value in row.items():
            if isinstance(value, tuple):
                print(f"  {key:12}{value[0]:8.2f}{value[1]:8.2f}")


if __name__ == "__main__":
    main()
