"""Exactly one ending a request, whatever happens: seeded schedules of faults, no time, no model."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest

from nbdist.errors import Overloaded, RankLostError, ServeError
from nbdist.messages import (
    CancelRequest,
    GenerateRequest,
    ModelServed,
    Sampling,
    ServeQuery,
    TokenEvent,
    Unhandled,
)
from nbdist.serve import Router
from nbdist.serve.batcher import Batcher
from nbdist.serve.engine import EngineLimits, TokenOutput
from nbdist.testing import ManualClock

NUM_SCHEDULES = 200
NUM_STEPS = 60


class FakeRanks:
    """Three ranks whose answers come when the schedule says so, on its own thread."""

    num_ranks = 3

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.gone: set[int] = set()
        self.hears: dict[int, list[str]] = defaultdict(list)
        self._handlers = defaultdict(list)

    def subscribe(self, kind, handler):
        self._handlers[kind].append(handler)
        return lambda: self._handlers[kind].remove(handler)

    def emit(self, rank, event) -> None:
        for handler in list(self._handlers[type(event)]):
            handler(rank, event)

    def post(self, rank, message) -> None:
        if rank in self.lost:
            raise RankLostError(f"rank {rank} is lost; start another", ranks=(rank,))
        if rank in self.gone:
            self.emit(rank, Unhandled(rank=rank, unhandled=message.kind, topic=""))
        elif isinstance(message, ServeQuery):
            self.emit(rank, ModelServed(rank=rank, model="default", version=1, max_batch=2,
                                        context_length=64))  # fmt: skip
        elif isinstance(message, GenerateRequest):
            self.hears[rank].append(message.request_id)
        else:
            assert isinstance(message, CancelRequest)


class Schedule:
    """A router, three ranks, and what was told of each request's ending."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.ranks = FakeRanks()
        self.router = Router(self.ranks, max_waiting=3, clock=self.clock)
        self.made: list = []
        self.endings: dict[str, list[str]] = {}
        self.refused = 0

    def step(self) -> None:
        actions = [self.submit] * 4 + [self.answer] * 6 + [self.cancel, self.wait, self.wait]
        if self.rng.random() < 0.03:
            actions = [self.lose, self.go]
        self.rng.choice(actions)()

    def submit(self) -> None:
        timeout_seconds = self.rng.choice([None, 0.0, 1.0, 5.0])
        try:
            generation = self.router.submit("fox", timeout_seconds=timeout_seconds)
        except ServeError:  # refused: nothing was made that could end
            self.refused += 1
            return
        told = self.endings[generation.request_id] = []
        generation.on_event(lambda g: told.append(g.finish_reason) if g.finish_reason else None)
        self.made.append(generation)

    def answer(self) -> None:
        """Any rank answers anything it ever heard of, in time, late, or twice."""
        rank = self.rng.randrange(3)
        if rank in self.ranks.lost or not self.ranks.hears[rank]:
            return
        reasons = [None, None, "stop", "length", "cancelled", "timeout", "overloaded", "error"]
        self.ranks.emit(
            rank,
            TokenEvent(
                request_id=self.rng.choice(self.ranks.hears[rank][-4:]),
                rank=rank,
                index=self.rng.randrange(3),
                text="a",
                finish_reason=self.rng.choice(reasons),
            ),
        )

    def cancel(self) -> None:
        if self.made:
            self.rng.choice(self.made).cancel()

    def wait(self) -> None:
        self.clock.advance(self.rng.choice([0.5, 2.0]))
        self.router.end_overdue()

    def lose(self) -> None:
        rank = self.rng.randrange(3)
        self.ranks.lost.add(rank)
        if self.rng.random() < 0.5:  # else it is noticed by the next message
            self.ranks.emit(rank, Unhandled(rank=rank, unhandled="lost"))

    def go(self) -> None:
        self.ranks.gone.add(self.rng.randrange(3))


@pytest.fixture(scope="module")
def finished() -> list[Schedule]:
    schedules = []
    for seed in range(NUM_SCHEDULES):
        one = Schedule(seed)
        for _ in range(NUM_STEPS):
            one.step()
        one.clock.advance(10)  # every deadline has passed, and every rank may hang
        one.router.end_overdue()
        late = [g for g in one.made if g.timeout_seconds is not None and not g.finish_reason]
        assert not late, f"seed {seed}: a deadline did not end {late}"
        one.router.close()
        schedules.append(one)
    return schedules


def test_router_under_faults_tells_each_request_one_ending(finished):
    for seed, one in enumerate(finished):
        told = {g.request_id: [g.finish_reason] for g in one.made}
        assert one.endings == told, f"seed {seed}"
        assert one.router.num_outstanding == 0, f"seed {seed}"


def test_router_under_faults_is_driven_into_every_ending(finished):
    reasons = Counter(g.finish_reason for one in finished for g in one.made)

    assert set(reasons) == {
        "stop", "length", "cancelled", "timeout", "overloaded", "replica_lost", "error",
    }  # fmt: skip
    assert sum(one.refused for one in finished) > 0


def test_router_closed_refuses_a_request_that_nobody_would_end():
    one = Schedule(0)
    one.router.close()

    with pytest.raises(ServeError, match="the router is closed; make a new one"):
        one.router.submit("fox")


class FakeEngine:
    """An engine that refuses, fails, ends and goes on as a seed says."""

    name = "fake"
    limits = EngineLimits(vocab_size=320, context_length=64, max_batch=2, capacity_tokens=64)

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.running: list[str] = []
        self.ever: list[str] = []

    def submit(self, request) -> None:
        if len(self.running) > 4:
            raise Overloaded("5 requests wait; send it again", depth=5, limit=5)
        if self.rng.random() < 0.1:
            raise self.rng.choice([ValueError("no room; shorten it"), RuntimeError("a fault")])
        self.running.append(request.request_id)
        self.ever.append(request.request_id)

    def cancel(self, request_id) -> bool:
        known = request_id in self.running
        if known:
            self.running.remove(request_id)
        return known

    def wait_seconds(self):
        return 0.0 if self.running else None

    def step(self):
        reasons = [None, None, None, "stop", "length", "error"]
        # a bad engine: it speaks of requests that it has ended before as well
        named = [*self.running, *self.ever[-2:]]
        return [
            TokenOutput(
                request_id=name,
                token_ids=[self.rng.randrange(400)],  # some of them no tokenizer knows
                finish_reason=self.rng.choice(reasons),
            )
            for name in named
        ]


def test_batcher_under_faults_emits_one_ending_a_request_and_nothing_after_it(tokenizer):
    reasons: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        rng, clock = random.Random(seed), ManualClock()
        events: dict[str, list[str | None]] = defaultdict(list)
        batcher = Batcher(
            FakeEngine(rng),
            tokenizer,
            emit=lambda e, to=events: to[e.request_id].append(e.finish_reason),
            clock=clock,
        )
        for number in range(30):
            _disturb(batcher, rng, clock, number)
        batcher.end_all(rng.choice(["cancelled", "error"]), "the replica ended")

        assert len(events) == 30, f"seed {seed}"
        for name, told in events.items():
            assert [r for r in told if r] == told[-1:], f"seed {seed}: {name} was told {told}"
            reasons[told[-1]] += 1
        assert batcher.num_requests == 0
    assert set(reasons) == {"stop", "length", "cancelled", "timeout", "overloaded", "error"}


def _disturb(batcher: Batcher, rng: random.Random, clock: ManualClock, number: int) -> None:
    """Send a request, and perhaps let time pass, cancel something, and do a step."""
    batcher.submit(
        GenerateRequest(
            request_id=f"r{number}",
            model="m",
            prompt=rng.choice(["fox", "the lazy dog", ""]),
            sampling=Sampling(temperature=rng.choice([0.0, -1.0, 1.0])),
            timeout_seconds=rng.choice([None, None, -1.0, 0.0, 1.5]),
        )
    )
    if rng.random() < 0.2:
        batcher.cancel(f"r{rng.randrange(number + 1)}")
    clock.advance(rng.choice([0.0, 1.0]))
    if rng.random() < 0.5:
        batcher.step()
