"""The scheduler alone, under a clock that moves when told."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from nbdist.errors import Overloaded
from nbdist.serve.scheduler import Scheduler
from nbdist.testing import ManualClock


@dataclass(frozen=True)
class FakeRow:
    request_id: str
    num_prompt_tokens: int = 4


@pytest.fixture
def clock():
    return ManualClock()


def scheduler_of(clock, **options) -> Scheduler[FakeRow]:
    defaults = {"max_batch": 3, "window_seconds": 0.5, "max_waiting": 2}
    return Scheduler(clock=clock, **{**defaults, **options})


def ids(rows) -> list[str]:
    return [row.request_id for row in rows]


def test_scheduler_when_idle_takes_what_arrives_within_the_window_together(clock):
    scheduler = scheduler_of(clock)
    scheduler.submit(FakeRow("a"))
    assert scheduler.take() == []
    assert scheduler.wait_seconds() == 0.5

    clock.advance(0.4)
    scheduler.submit(FakeRow("b"))
    assert scheduler.take() == []
    clock.advance(0.2)

    assert ids(scheduler.take()) == ["a", "b"]


def test_scheduler_with_a_full_batch_does_not_wait_for_the_window(clock):
    scheduler = scheduler_of(clock)
    for name in "abc":
        scheduler.submit(FakeRow(name))

    assert scheduler.wait_seconds() == 0.0
    assert ids(scheduler.take()) == ["a", "b", "c"]


def test_scheduler_with_running_rows_lets_others_join_at_once(clock):
    scheduler = scheduler_of(clock, window_seconds=0.0)
    scheduler.submit(FakeRow("a"))
    scheduler.take()

    scheduler.submit(FakeRow("b"))

    assert ids(scheduler.take()) == ["b"]
    assert ids(scheduler.active) == ["a", "b"]


def test_scheduler_with_no_request_waits_for_ever(clock):
    assert scheduler_of(clock).wait_seconds() is None


def test_scheduler_end_moves_the_last_row_into_the_free_slot(clock):
    scheduler = scheduler_of(clock, window_seconds=0.0)
    for name in "abc":
        scheduler.submit(FakeRow(name))
    scheduler.take()

    assert scheduler.slot("a") == 0
    assert scheduler.end("a") == FakeRow("a")

    assert ids(scheduler.active) == ["c", "b"]


def test_scheduler_end_gives_a_row_out_once_wherever_it_is(clock):
    scheduler = scheduler_of(clock)
    scheduler.submit(FakeRow("a"))

    assert scheduler.end("a") == FakeRow("a")
    assert scheduler.end("a") is None
    assert scheduler.end("never came") is None
    assert scheduler.wait_seconds() is None


def test_scheduler_with_a_full_queue_names_depth_and_limit(clock):
    scheduler = scheduler_of(clock)
    for name in "abcde":
        scheduler.submit(FakeRow(name))

    with pytest.raises(Overloaded, match=r"max_batch=3 \+ max_waiting=2") as caught:
        scheduler.submit(FakeRow("f"))

    assert (caught.value.depth, caught.value.limit) == (2, 2)


def test_scheduler_with_a_known_id_refuses_it(clock):
    scheduler = scheduler_of(clock)
    scheduler.submit(FakeRow("a"))

    with pytest.raises(ValueError, match="'a' is already running"):
        scheduler.submit(FakeRow("a"))


def test_scheduler_splits_a_prefill_above_the_token_budget(clock):
    scheduler = scheduler_of(clock, window_seconds=0.0, max_prefill_tokens=10)
    for name, size in (("a", 4), ("b", 5), ("c", 2)):
        scheduler.submit(FakeRow(name, size))

    assert ids(scheduler.take()) == ["a", "b"]
    assert ids(scheduler.take()) == ["c"]


def test_scheduler_lets_one_prompt_above_the_budget_through(clock):
    scheduler = scheduler_of(clock, window_seconds=0.0, max_prefill_tokens=10)
    scheduler.submit(FakeRow("long", 99))

    assert ids(scheduler.take()) == ["long"]


def test_scheduler_with_no_slot_is_refused(clock):
    with pytest.raises(ValueError, match="max_batch=0"):
        scheduler_of(clock, max_batch=0)


def test_scheduler_under_random_traffic_ends_every_request_once(clock):
    rng = random.Random(0)
    scheduler = scheduler_of(clock, max_waiting=20)
    came, ended = [], []
    for number in range(400):
        clock.advance(rng.random())
        if rng.random() < 0.6 and len(scheduler.rows) < 23:
            came.append(f"r{number}")
            scheduler.submit(FakeRow(came[-1], rng.randrange(1, 9)))
        scheduler.take()
        assert len(scheduler.active) <= 3
        if scheduler.rows and rng.random() < 0.6:
            ended.append(scheduler.end(rng.choice(scheduler.rows).request_id).request_id)
    ended += [scheduler.end(row.request_id).request_id for row in scheduler.rows]

    assert sorted(ended) == sorted(came)
