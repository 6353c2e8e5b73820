"""The scheduler alone, under a clock that moves when told."""

from __future__ import annotations

import random

import pytest

from nbdist.errors import Overloaded
from nbdist.messages import Sampling
from nbdist.serve.blocks import BlockPool
from nbdist.serve.engine import EngineRequest
from nbdist.serve.scheduler import Scheduler
from nbdist.serve.sequence import Sequence
from nbdist.testing import ManualClock


@pytest.fixture
def clock():
    return ManualClock()


def sequence(request_id: str, num_tokens: int = 4, first: int = 0) -> Sequence:
    ids = [first + n for n in range(num_tokens)]
    return Sequence(
        EngineRequest(request_id=request_id, prompt_ids=ids, sampling=Sampling()), list(ids)
    )


def scheduler_of(clock, *, num_blocks=64, block_size=4, **options) -> Scheduler:
    defaults = {
        "max_batch": 3,
        "window_seconds": 0.0,
        "max_waiting": 2,
        "max_step_tokens": 64,
    }
    return Scheduler(BlockPool(num_blocks, block_size), clock=clock, **{**defaults, **options})


def step(scheduler: Scheduler) -> dict[str, int]:
    """Compute what is scheduled, give each finished chunk a token; tokens computed by id."""
    sizes = {}
    for chunk in scheduler.schedule():
        if chunk.num_logits:
            chunk.sequence.token_ids.append(7)
        scheduler.computed(chunk, len(chunk.token_ids))
        sizes[chunk.sequence.request_id] = len(chunk.token_ids)
    return sizes


def test_scheduler_when_idle_takes_what_arrives_within_the_window_together(clock):
    scheduler = scheduler_of(clock, window_seconds=0.5)
    scheduler.submit(sequence("a"))
    assert step(scheduler) == {}
    assert scheduler.wait_seconds() == 0.5

    clock.advance(0.4)
    scheduler.submit(sequence("b"))
    assert step(scheduler) == {}
    clock.advance(0.2)

    assert step(scheduler) == {"a": 4, "b": 4}


def test_scheduler_with_a_full_batch_does_not_wait_for_the_window(clock):
    scheduler = scheduler_of(clock, window_seconds=0.5)
    for name in "abc":
        scheduler.submit(sequence(name))

    assert scheduler.wait_seconds() == 0.0
    assert step(scheduler) == {"a": 4, "b": 4, "c": 4}


def test_scheduler_with_no_request_waits_for_ever(clock):
    assert scheduler_of(clock).wait_seconds() is None


def test_scheduler_computes_every_decoder_beside_pieces_of_a_long_prompt(clock):
    scheduler = scheduler_of(clock, max_step_tokens=10)
    scheduler.submit(sequence("a"))
    scheduler.submit(sequence("b"))
    step(scheduler)
    scheduler.submit(sequence("long", 30, first=100))

    steps = [step(scheduler) for _ in range(4)]

    # two decoders take one token each, the prompt what is left of the ten
    assert [s["long"] for s in steps] == [8, 8, 8, 6]
    assert all(s["a"] == s["b"] == 1 for s in steps)


def test_scheduler_serves_every_decoder_even_beyond_the_budget(clock):
    scheduler = scheduler_of(clock, max_step_tokens=4)
    for name in "abc":
        scheduler.submit(sequence(name))
    for _ in range(8):
        step(scheduler)
    scheduler._max_step_tokens = 1

    assert step(scheduler) == {"a": 1, "b": 1, "c": 1}


def test_scheduler_without_blocks_takes_the_newest_row_back_and_loses_no_token(clock):
    scheduler = scheduler_of(clock, num_blocks=5, max_waiting=9)
    scheduler.submit(sequence("old", 7))
    scheduler.submit(sequence("new", 7, first=50))
    step(scheduler)
    assert [row.request_id for row in scheduler.running] == ["old", "new"]
    for _ in range(3):
        step(scheduler)

    [waiting] = scheduler.waiting
    assert waiting.request_id == "new"
    assert scheduler.num_preempted == 1
    assert waiting.token_ids[:7] == list(range(50, 57))
    assert waiting.num_generated >= 1
    scheduler.end("old")
    assert step(scheduler)["new"] >= 1


def test_scheduler_admits_only_what_fits_beside_the_running_rows(clock):
    scheduler = scheduler_of(clock, num_blocks=6, max_waiting=9)
    scheduler.submit(sequence("a", 12))
    scheduler.submit(sequence("b", 12, first=50))

    step(scheduler)

    assert [row.request_id for row in scheduler.running] == ["a"]


def test_scheduler_finds_the_start_of_a_known_prompt(clock):
    scheduler = scheduler_of(clock)
    scheduler.submit(sequence("a", 10))
    step(scheduler)
    scheduler.submit(sequence("b", 10))

    assert step(scheduler) == {"a": 1, "b": 2}
    assert (scheduler.num_prompt_tokens, scheduler.num_prefix_tokens) == (20, 8)


def test_scheduler_drops_a_draft_rather_than_a_row(clock):
    scheduler = scheduler_of(clock, num_blocks=5)
    for name, first in (("a", 0), ("b", 50)):
        scheduler.submit(sequence(name, 7, first=first))
    step(scheduler)
    for row in scheduler.running:
        row.draft = [1, 2, 3]

    chunks = scheduler.schedule()

    assert [len(chunk.token_ids) for chunk in chunks] == [1, 1]
    assert scheduler.num_preempted == 0


def test_scheduler_end_gives_a_row_out_once_wherever_it_is(clock):
    scheduler = scheduler_of(clock, window_seconds=0.5)
    a = sequence("a")
    scheduler.submit(a)

    assert scheduler.end("a") is a
    assert scheduler.end("a") is None
    assert scheduler.end("never came") is None
    assert scheduler.wait_seconds() is None


def test_scheduler_with_a_full_queue_names_depth_and_limit(clock):
    scheduler = scheduler_of(clock)
    for name in "abcde":
        scheduler.submit(sequence(name))

    with pytest.raises(Overloaded, match=r"max_batch=3 \+ max_waiting=2") as caught:
        scheduler.submit(sequence("f"))

    assert (caught.value.depth, caught.value.limit) == (2, 2)


def test_scheduler_with_a_known_id_refuses_it(clock):
    scheduler = scheduler_of(clock)
    scheduler.submit(sequence("a"))

    with pytest.raises(ValueError, match="'a' is already running"):
        scheduler.submit(sequence("a"))


@pytest.mark.parametrize("options", [{"max_batch": 0}, {"max_step_tokens": 0}])
def test_scheduler_that_could_run_nothing_is_refused(clock, options):
    with pytest.raises(ValueError, match="an engine needs"):
        scheduler_of(clock, **options)


def test_scheduler_under_random_traffic_ends_every_request_once_and_frees_all(clock):
    rng = random.Random(0)
    scheduler = scheduler_of(clock, num_blocks=12, max_waiting=20)
    came, ended = [], []
    for number in range(600):
        clock.advance(rng.random())
        if rng.random() < 0.6 and len(scheduler) < 23:
            came.append(f"r{number}")
            scheduler.submit(sequence(came[-1], rng.randrange(1, 20), first=rng.randrange(3)))
        step(scheduler)
        assert len(scheduler.running) <= 3
        rows = [*scheduler.running, *scheduler.waiting]
        full = [row for row in rows if len(row.token_ids) > 40]
        picked = full or ([rng.choice(rows)] if rows and rng.random() < 0.3 else [])
        ended += [scheduler.end(row.request_id).request_id for row in picked]
    for row in [*scheduler.running, *scheduler.waiting]:
        ended.append(scheduler.end(row.request_id).request_id)

    assert sorted(ended) == sorted(came)
    assert scheduler.num_preempted > 0
    assert scheduler.pool.num_free == 12
