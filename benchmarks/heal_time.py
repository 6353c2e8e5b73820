"""Time from the call of `World.heal` to a verified group: with a spare against without.

Two worlds of two ranks take turns: rank 1 is killed, the world notices, `heal` is called. A turn
begins when the spare that follows the last one is ready.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time

from nbdist import World

WAIT_SECONDS = 120.0


def wait_until(condition: object, what: str) -> None:
    """Return when a condition holds."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {WAIT_SECONDS:g} s")
        time.sleep(0.01)


def heal_once(world: World) -> tuple[float, float]:
    """Kill rank 1 and heal; return seconds to the verified group, and to all names restored."""
    os.kill(world.infos[1].pid, signal.SIGKILL)
    wait_until(lambda: 1 in world.lost_ranks, "the news of the death")
    world.heal()
    assert world.last_heal is not None, "a rank was lost"
    return world.last_heal.group_seconds, world.last_heal.seconds


def measure(repeats: int) -> dict[str, object]:
    """Return medians and longest times; the first turn loads what a heal needs, uncounted."""
    times: dict[str, list[tuple[float, float]]] = {"spare": [], "without": []}
    with World.start(2, spares=1) as spared, World.start(2) as bare:
        for world in (spared, bare):
            world.push(pushed=1)
        for turn in range(repeats + 1):
            for name, world in (("spare", spared), ("without", bare)):
                wait_until(lambda: spared.num_spares_ready == 1, "a spare")
                seconds = heal_once(world)
                if turn:
                    times[name].append(seconds)
    row: dict[str, object] = {"repeats": repeats}
    for name, found in times.items():
        row[name] = statistics.median(group for group, _ in found)
        row[f"{name}_longest"] = max(group for group, _ in found)
        row[f"{name}_with_names"] = statistics.median(whole for _, whole in found)
    return row


def main() -> None:
    """Print the table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    row = measure(options.repeats)
    if options.json:
        print(json.dumps({"benchmark": "heal_time", "unit": "s", **row}))
        return
    print(f"s over {row['repeats']} turns, 2 ranks; wanted: spare at most 1.0, without 3.5")
    for name in ("spare", "without"):
        median, longest, whole = row[name], row[f"{name}_longest"], row[f"{name}_with_names"]
        print(f"  {name:8} median {median:.2f}, longest {longest:.2f}, with names {whole:.2f}")


if __name__ == "__main__":
    main()
