"""The notebook that kills a rank, run once; each test looks at one promise."""

from __future__ import annotations

import re

import pytest

SECONDS = 240  # about 25 s on two cores that do nothing else

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(SECONDS + 30)]


@pytest.fixture(scope="module")
def shown(texts_of) -> dict[str, str]:
    """The text that each cell of the notebook shows, by the cell's id."""
    return texts_of("06_kill_a_rank", SECONDS)


def test_the_run_goes_on_after_a_kill(shown):
    assert "rank 1: killed by SIGKILL; replaced, all go on after step" in shown["broken"]
    assert "steps 1-40" in shown["broken"]


def test_rank_1_is_another_process_in_the_same_cell(shown):
    pids = dict(re.findall(r"rank (\d) is process (\d+)", shown["broken"]))
    assert sorted(pids) == ["0", "1"]
    assert re.search(rf"^1\s.*\b{pids['1']}\b", shown["start"], re.MULTILINE) is None


def test_the_losses_are_those_of_the_unbroken_run(shown):
    assert "[0-1] losses equal, bit for bit: True" in shown["same"]


def test_the_log_of_the_world_has_the_incident(shown):
    assert shown["incidents"].count("killed by SIGKILL; replaced") == 1
    assert "state from memory of peers" in shown["incidents"]
