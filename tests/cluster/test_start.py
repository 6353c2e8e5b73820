"""A start that fails names its stage and its cause, and leaves nothing."""

import os
from pathlib import Path

import psutil
import pytest

from nbdist import World, runfiles
from nbdist.errors import StartError


def processes_of_worlds():
    """Processes started for any world of this test run, known by its run directory."""
    where = str(runfiles.base_directory())
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(where in part for part in process.info["cmdline"] or []):
            found.append(process)
    return found


@pytest.mark.parametrize(
    ("settings", "stage", "text"),
    [
        ({"interface": "203.0.113.1"}, "MPI start", "Cannot assign requested address"),
        ({"timeout_seconds": 0.3}, None, "give it more time with timeout_seconds="),
    ],
)
def test_failed_start_names_stage_and_cause_and_leaves_nothing(settings, stage, text):
    before = processes_of_worlds()
    with pytest.raises(StartError) as caught:
        World.start(2, **settings)

    assert text in str(caught.value)
    assert caught.value.stage == stage or stage is None
    left = [p for p in processes_of_worlds() if p not in before]
    _, alive = psutil.wait_procs(left, timeout=3)
    assert alive == []
    assert list(Path(runfiles.base_directory()).iterdir()) == []


def test_start_with_more_ranks_than_cores_works():
    ranks = len(os.sched_getaffinity(0)) + 1
    with World.start(ranks) as world:
        assert world.run("print(world_size)").text == dict.fromkeys(range(ranks), f"{ranks}\n")
