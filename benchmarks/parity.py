"""Print the table of docs/parallelism.md: every mesh against one process, over 10 steps.

Loss, gradient norm and every element of every clipped gradient, in float64. Takes
about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

from nbdist.testing import run_ranks

NUM_STEPS = 10


def load_cases() -> ModuleType:
    path = Path(__file__).parents[1] / "tests" / "ranks" / "test_parity.py"
    spec = importlib.util.spec_from_file_location("test_parity", path)
    assert spec is not None, "the path is a Python file"
    assert spec.loader is not None, "the path is a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules["test_parity"] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", help="only these numbers of ranks")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    as_json = options.json
    cases = load_cases()
    rows, failed = [], 0
    if not as_json:
        print("| ranks | mesh | tolerance | loss | norm | gradient |\n|---|---|---|---|---|---|")
    for world_size, of_world in cases.ALL_CASES.items():
        if options.ranks and world_size not in options.ranks:
            continue
        found = run_ranks(cases.compare_cases, world_size, of_world, NUM_STEPS, timeout_seconds=600)
        for name in of_world:
            parities = [result[name] for result in found]
            worst = {k: max(getattr(p, k) for p in parities) for k in ("loss", "norm", "gradient")}
            failed += max(worst.values()) >= cases.TOLERANCE
            rows.append({"ranks": world_size, "mesh": name} | dataclasses.asdict(parities[0]))
            if as_json:
                continue
            numbers = " | ".join(f"{value:.0e}" for value in worst.values())
            print(f"| {world_size} | {name} | {cases.TOLERANCE:.0e} | {numbers} |", flush=True)
    if as_json:
        print(json.dumps({"benchmark": "parity", "unit": "difference", "rows": rows}))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
