"""The tutorials of serving, each run once; each test looks at one promise."""

from __future__ import annotations

import re

import pytest

SECONDS = 240  # about 30 s each on two cores that do nothing else

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(SECONDS + 30)]


@pytest.fixture(scope="module")
def batching(texts_of) -> dict[str, str]:
    """What the cells of the tutorial of batching and cache show, by the cell's id."""
    return texts_of("07_batching_and_cache", SECONDS)


@pytest.fixture(scope="module")
def replicas(texts_of) -> dict[str, str]:
    """What the cells of the tutorial of speculation and replicas show."""
    return texts_of("08_speculation_and_replicas", SECONDS)


@pytest.fixture(scope="module")
def cascade(texts_of) -> dict[str, str]:
    """What the cells of the tutorial of edge and centre show."""
    return texts_of("09_edge_to_centre", SECONDS)


def test_continuous_batches_give_the_same_answers_sooner(batching):
    half = dict(re.findall(r"(\w+): half of the answers after ([\d.]+) s", batching["compare"]))

    assert "answers equal: True" in batching["compare"]
    # short answers need not wait for long ones: about six times sooner, whatever the machine
    assert float(half["continuous"]) < float(half["static"])


def test_paged_cache_wastes_less_than_a_contiguous_one(batching):
    row = batching["cache"].splitlines()[1]
    paged, contiguous = map(int, re.findall(r"(\d+)%", row))

    assert int(row.split()[1]) == 6
    assert paged < contiguous


def test_prompts_that_begin_alike_are_computed_once(batching):
    found, asked = map(int, re.search(r"(\d+) of (\d+) prompt", batching["prefix"]).groups())

    assert asked / 2 < found < asked


def test_panel_streams_and_unload_frees(batching):
    assert "[1] length, 24 tokens" in batching["panel-answer"]
    assert {"static", "continuous"} <= set(batching["listed"].split())
    assert "continuous, static unloaded; resident" in batching["unload"]


def test_guesses_save_steps_and_change_no_answer(replicas):
    steps = [int(count) for count in re.findall(r"in (\d+) steps", replicas["guess"])]

    assert "answers equal: True" in replicas["guess"]
    assert steps[1] < steps[0]


def test_killed_replica_loses_only_what_it_had_begun(replicas):
    ended = re.findall(r"(\d+) ended as (\w+) on rank (\d)", replicas["kill"])
    counts = {(reason, int(rank)): int(count) for count, reason, rank in ended}

    assert sum(counts.values()) == 24
    assert 1 <= counts["replica_lost", 1] <= 4  # what its batch holds
    # more than the half that rank 0 had: those of rank 1 came too
    assert counts["length", 0] > 12
    assert "rank 1 was lost after" in replicas["kill"]
    assert "begin with what was kept of the old ones: True" in replicas["again"]


def test_both_replicas_answer_before_the_kill_and_after_the_heal(replicas):
    for cell in ("spread", "healed"):
        by_rank = re.search(r"answers by rank: \{0: (\d+), 1: (\d+)\}", replicas[cell])
        assert sum(map(int, by_rank.groups())) == 16
    assert "rank 1 replaced in" in replicas["heal"]


def test_cascade_forwards_less_the_lower_its_threshold(cascade):
    shares = [int(part) for part in re.findall(r"(\d+)% forwarded", cascade["cascade"])]

    assert shares[0] == 100
    assert shares[-1] == 0
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[1] < 100


def test_large_model_is_right_more_often(cascade):
    small, large = re.findall(r": [\d,]+ weights, ([\d.]+)% right", cascade["train"])

    assert float(small) < float(large)


def test_cut_link_gives_marked_answers_and_a_slow_one_takes_4_bits(cascade):
    fast, cut, slow = (line for line in cascade["link"].splitlines() if " link, " in line)

    assert "weights in 8 bits" in fast
    assert re.search(r"\b0% forwarded", cut)
    assert not re.search(r"\b0% fallback", cut)
    assert re.search(r"\b0% fallback", slow)
    assert "weights in 4 bits" in slow


def test_edge_takes_new_weights_when_it_is_refused(cascade):
    assert "updates: 1; other weights: True" in cascade["update"]


@pytest.mark.parametrize("name", ["batching", "replicas", "cascade"])
def test_serving_tutorials_show_no_traceback(request, name):
    shown = request.getfixturevalue(name)
    assert [cell for cell, text in shown.items() if "Traceback" in text] == []
