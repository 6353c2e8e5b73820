"""The router over two replicas in one process, with faults put in."""

from __future__ import annotations

import threading

import pytest

from nbdist.errors import Overloaded, ServeError
from nbdist.messages import CancelRequest, GenerateRequest, ModelServed, ServeQuery, TokenEvent
from nbdist.serve import Router, generate, serve
from nbdist.testing import ManualClock

GREEDY = {"temperature": 0.0, "max_new_tokens": 12}


@pytest.fixture
def router(model, tokenizer, ranks):
    replicas = [serve(model, tokenizer, port=port) for port in ranks.ports]
    made = Router(ranks)
    yield made
    made.close()
    for replica in replicas:
        replica.stop()


class FakeReplica:
    """A rank that serves and answers only when told."""

    def __init__(self, port, *, max_batch: int = 2) -> None:
        self.port = port
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.served = ModelServed(
            rank=port.rank, model="default", version=1, max_batch=max_batch, context_length=64
        )
        port.on_message(ServeQuery, lambda _: port.emit(self.served))
        port.on_message(GenerateRequest, self.requests.append)
        port.on_message(CancelRequest, lambda message: self.cancelled.append(message.request_id))

    def answer(self, request_id: str, index: int, text: str, finish_reason=None) -> None:
        self.port.emit(
            TokenEvent(
                request_id=request_id,
                rank=self.port.rank,
                index=index,
                text=text,
                finish_reason=finish_reason,
                num_prompt_tokens=3,
            )
        )


class Endings:
    """Counts the endings of requests and lets a test wait for them."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        self._changed = threading.Condition()

    def watch(self, generation) -> None:
        self.count.setdefault(generation.request_id, 0)
        generation.on_event(self._note)

    def _note(self, generation) -> None:
        if generation.finish_reason is not None:
            with self._changed:
                self.count[generation.request_id] += 1
                self._changed.notify_all()


@pytest.fixture
def fakes(ranks):
    return [FakeReplica(port) for port in ranks.ports]


def flush(ranks) -> None:
    """Wait until the link thread has brought what was sent before."""
    done = threading.Event()
    stop = ranks.subscribe(ModelServed, lambda *_: done.set())
    ranks.ports[-1].emit(
        ModelServed(rank=1, model="flush", version=1, max_batch=1, context_length=1)
    )
    assert done.wait(10), "the link thread did not answer"
    stop()


def test_router_with_burst_equals_one_at_a_time_on_both_ranks(router, greedy, prompts):
    made = router.generate(prompts, **GREEDY)

    assert [g.text for g in made] == [greedy.text(prompt, 12) for prompt in prompts]
    assert {g.rank for g in made} == {0, 1}
    assert max(g.batch_size for g in made) > 1
    assert all(g.first_token_seconds > 0 and g.tokens_per_second > 0 for g in made)


def test_generation_iterated_gives_the_pieces_of_its_text(router, greedy):
    generation = router.submit("the quick", **GREEDY)

    assert "".join(generation) == generation.result(20) == greedy.text("the quick", 12)
    assert generation.num_tokens == 12
    assert generation.finish_reason == "length"


def test_generation_cancelled_in_the_middle_keeps_its_text(router):
    generation = router.submit("the quick", temperature=0.0, max_new_tokens=80)
    next(iter(generation))
    generation.cancel()

    text = generation.result(20)

    assert generation.finish_reason == "cancelled"
    assert text.startswith(generation.text)
    assert router.num_outstanding == 0


def test_router_with_bad_prompt_ends_it_by_error_and_serves_the_others(router, greedy):
    bad, good = router.generate(["", "fox"], **GREEDY)

    with pytest.raises(ServeError, match="ended by `error`: the prompt holds 0 tokens"):
        bad.result()
    with pytest.raises(ServeError, match="0 tokens"):
        list(bad)
    assert good.text == greedy.text("fox", 12)


def test_router_with_bad_sampling_reaches_no_rank(router):
    with pytest.raises(ValueError, match="temperature=-1"):
        router.submit("fox", temperature=-1)


def test_generate_in_one_call_keeps_the_order_of_more_prompts_than_fit(
    model, tokenizer, ranks, greedy
):
    replica = serve(model, tokenizer, max_batch=4, port=ranks.ports[0])
    wanted = ["fox", "the lazy dog", "quick"] * 40

    made = generate(ranks, wanted, temperature=0.0, max_new_tokens=3)

    assert [g.prompt for g in made] == wanted
    assert [g.text for g in made[:3]] == [greedy.text(prompt, 3) for prompt in wanted[:3]]
    replica.stop()


def test_router_without_a_replica_says_how_to_serve(ranks):
    with pytest.raises(ServeError) as caught:
        Router(ranks)

    assert str(caught.value) == (
        "no model named 'default' is served by ranks 0-1; run `serve(model, tokenizer)` in a "
        "%%distributed cell first"
    )


def test_router_with_one_silent_rank_goes_on_with_the_other(ranks):
    FakeReplica(ranks.ports[0])
    ranks.ports[1].on_message(ServeQuery, lambda _: None)

    router = Router(ranks, query_seconds=0.05)

    assert list(router.replicas) == [0]


def test_router_sends_to_the_rank_with_the_fewest_unfinished_requests(ranks, fakes):
    router = Router(ranks)
    for number in range(4):
        router.submit(f"p{number}")
    assert [r.prompt for r in fakes[0].requests] == ["p0", "p2"]
    for request in fakes[1].requests:
        fakes[1].answer(request.request_id, 1, "x", "stop")
    flush(ranks)

    router.submit("p4")
    router.submit("p5")

    assert [r.prompt for r in fakes[1].requests] == ["p1", "p3", "p4", "p5"]


def test_router_above_its_limit_raises_overloaded_with_depth_and_limit(ranks, fakes):
    router = Router(ranks, max_waiting=1)
    for _ in range(6):
        router.submit("fox")

    with pytest.raises(Overloaded, match=r"2 requests wait on ranks \[0, 1\]") as caught:
        router.submit("fox")

    assert (caught.value.depth, caught.value.limit) == (2, 2)


def test_generation_numbers_follow_the_clock(ranks, fakes):
    clock = ManualClock()
    router = Router(ranks, clock=clock)
    generation = router.submit("fox")
    assert generation.tokens_per_second is None
    for index in (1, 2, 3):
        clock.advance(0.5)
        fakes[0].answer(generation.request_id, index, "ab", "stop" if index == 3 else None)
        flush(ranks)

    assert generation.first_token_seconds == 0.5
    assert generation.tokens_per_second == 2.0
    assert generation.seconds == 1.5
    assert generation.num_prompt_tokens == 3
    assert repr(generation) == "Generation(stop, num_tokens=3, text='ababab')"


def test_generation_result_with_a_timeout_says_that_it_goes_on(ranks, fakes):
    generation = Router(ranks).submit("fox")

    with pytest.raises(TimeoutError, match=r"timeout_seconds=0\.01 and goes on"):
        generation.result(0.01)

    assert generation.finish_reason is None


def test_generation_interrupted_while_waiting_is_cancelled(ranks, fakes, monkeypatch):
    generation = Router(ranks).submit("fox")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Condition, "wait_for", interrupt)
    with pytest.raises(KeyboardInterrupt):
        generation.result()
    with pytest.raises(KeyboardInterrupt):
        next(iter(generation))

    assert fakes[0].cancelled == [generation.request_id] * 2


def test_generation_handler_that_fails_does_not_stop_the_events(ranks, fakes, caplog):
    generation = Router(ranks).submit("fox")
    generation.on_event(lambda _: 1 / 0)
    fakes[0].answer(generation.request_id, 1, "a")
    fakes[0].answer(generation.request_id, 2, "b", "stop")

    assert generation.result(10) == "ab"
    assert "ZeroDivisionError" in caplog.text


def test_generation_handler_added_after_the_end_is_called_at_once(ranks, fakes):
    generation = Router(ranks).submit("fox")
    fakes[0].answer(generation.request_id, 1, "a", "stop")
    generation.wait(10)
    seen = []

    generation.on_event(seen.append)

    assert seen == [generation]


def test_lost_rank_retries_what_it_has_not_answered_once_and_ends_the_rest(ranks, fakes):
    router = Router(ranks)
    started, fresh = router.submit("started"), None
    fakes[0].answer(started.request_id, 1, "so far")
    flush(ranks)
    router.submit("on rank 1")
    fresh = router.submit("fresh")
    assert [r.prompt for r in fakes[0].requests] == ["started", "fresh"]

    ranks.lose(0)
    assert started.wait(10)
    flush(ranks)

    assert (started.finish_reason, started.text) == ("replica_lost", "so far")
    assert "rank 0 was lost after 1 tokens" in started.detail
    assert [r.prompt for r in fakes[1].requests] == ["on rank 1", "fresh"]
    fakes[1].answer(fresh.request_id, 1, "done", "stop")
    assert (fresh.result(10), fresh.rank) == ("done", 1)
    assert router.submit("next").rank == 1


def test_both_ranks_lost_end_every_request_as_replica_lost(ranks, fakes):
    router = Router(ranks)
    made = [router.submit(f"p{number}") for number in range(4)]

    ranks.lose(0)
    ranks.lose(1)

    assert all(g.wait(10) for g in made)
    assert {g.finish_reason for g in made} == {"replica_lost"}
    with pytest.raises(ServeError, match="no model named"):
        router.submit("fox")


def test_submit_to_a_rank_that_was_lost_unseen_goes_to_the_next(ranks, fakes, monkeypatch):
    router = Router(ranks)
    monkeypatch.setattr(ranks, "deliver", lambda *_: None)  # the news never comes
    ranks.lose(0)

    generation = router.submit("fox")

    assert generation.rank == 1
    assert list(router.replicas) == [1]


def test_cancelled_request_on_a_lost_rank_is_not_sent_again(ranks, fakes):
    router = Router(ranks)
    generation = router.submit("fox")
    generation.cancel()

    ranks.lose(0)

    assert generation.wait(10)
    assert generation.finish_reason == "cancelled"
    assert fakes[1].requests == []


def test_replica_taken_away_sends_its_requests_elsewhere(ranks, fakes):
    router = Router(ranks)
    ranks.ports[0].handlers.clear()

    generation = router.submit("fox")
    flush(ranks)

    assert generation.rank == 1
    assert [r.prompt for r in fakes[1].requests] == ["fox"]


def test_events_after_the_ending_or_from_another_rank_change_nothing(ranks, fakes):
    generation = Router(ranks).submit("fox")
    fakes[1].answer(generation.request_id, 1, "wrong rank")
    fakes[0].answer(generation.request_id, 1, "right", "stop")
    fakes[0].answer(generation.request_id, 2, "late", "length")
    flush(ranks)

    assert (generation.text, generation.finish_reason) == ("right", "stop")


def test_router_closed_ends_what_runs_and_listens_no_more(ranks, fakes):
    router = Router(ranks)
    generation = router.submit("fox")

    router.close()

    assert generation.finish_reason == "cancelled"
    assert fakes[0].cancelled == [generation.request_id]


def test_refresh_finds_a_replica_that_came_later(ranks):
    FakeReplica(ranks.ports[0])
    router = Router(ranks)
    FakeReplica(ranks.ports[1])

    router.refresh()

    assert list(router.replicas) == [0, 1]


def test_every_request_ends_exactly_once_under_faults(model, tokenizer, ranks, prompts):
    replicas = [serve(model, tokenizer, max_batch=3, port=port) for port in ranks.ports]
    router, endings, made = Router(ranks), Endings(), []
    faults = {
        8: lambda: made[3].cancel(),  # noqa: PLW0108 - `made` is filled later
        12: lambda: replicas.append(serve(model, tokenizer, max_batch=3, port=ranks.ports[1])),
        20: lambda: ranks.lose(0),
        30: lambda: [generation.cancel() for generation in made[:25]],
    }
    for number, prompt in enumerate([*prompts, ""]):
        made.append(router.submit(prompt, max_new_tokens=5 + number, temperature=1.0))
        endings.watch(made[-1])
        faults.get(number, lambda: None)()

    assert all(generation.wait(30) for generation in made)
    flush(ranks)
    router.close()
    assert list(endings.count.values()) == [1] * 41
    assert router.num_outstanding == 0
    assert {"length", "cancelled", "error"} <= {g.finish_reason for g in made}
    for replica in replicas:
        replica.stop()


def test_router_sends_a_known_start_to_the_replica_that_has_it_until_it_is_busy(fakes, ranks):
    router = Router(ranks)
    start = "the same long instructions for everyone, word by word, again. " * 8
    first = router.submit(start + "one", max_new_tokens=1)
    fakes[first.rank].answer(first.request_id, 1, "x", "length")
    assert first.wait(10)
    other = router.submit("something else", max_new_tokens=1)

    again = router.submit(start + "two", max_new_tokens=90)
    third = router.submit(start + "three", max_new_tokens=1)

    assert other.rank != first.rank
    assert again.rank == first.rank
    assert third.rank == other.rank
    router.close()


def test_router_counts_work_in_tokens_not_in_requests(fakes, ranks):
    router = Router(ranks)
    long = router.submit("a", max_new_tokens=500)

    short = [router.submit("b", max_new_tokens=5) for _ in range(3)]

    assert {generation.rank for generation in short} == {1 - long.rank}
    router.close()


def test_router_drains_a_replica_and_uses_it_again(fakes, ranks):
    router = Router(ranks)
    running = router.submit("a")
    assert not router.drain(running.rank, timeout_seconds=0.01)

    assert {router.submit("b").rank for _ in range(2)} == {1 - running.rank}
    fakes[running.rank].answer(running.request_id, 1, "x", "length")
    assert router.drain(running.rank, timeout_seconds=10)
    router.drain(1 - running.rank, timeout_seconds=0)
    with pytest.raises(Overloaded, match="all replicas are being drained"):
        router.submit("c")
    router.undrain(running.rank)

    assert router.submit("c").rank == running.rank
    router.close()


def test_router_stats_tell_what_each_engine_holds(router):
    running = [router.submit("the quick", temperature=0.0, max_new_tokens=80) for _ in range(2)]
    next(iter(running[0]))
    stats = router.stats()

    assert set(stats) == {0, 1}
    assert all(one.capacity_bytes > 0 for one in stats.values())
    assert sum(one.num_steps for one in stats.values()) > 0
    for generation in running:
        generation.cancel()


def test_request_on_a_rank_that_hangs_ends_by_timeout_at_the_client(ranks, fakes):
    generation = Router(ranks).submit("fox", timeout_seconds=0.0)

    assert generation.wait(20)
    assert generation.finish_reason == "timeout"
    assert "rank 0 did not end the request 0.0 s after it was sent" in generation.detail
    assert generation.result() == ""
    assert fakes[0].cancelled == [generation.request_id]


def test_request_with_a_timeout_that_is_no_time_reaches_no_rank(ranks, fakes):
    with pytest.raises(ValueError, match=r"timeout_seconds=-1 is not a finite number"):
        Router(ranks).submit("fox", timeout_seconds=-1)

    assert fakes[0].requests == []


def test_request_sent_to_another_rank_has_what_is_left_of_its_time(ranks, fakes):
    clock = ManualClock()
    router = Router(ranks, clock=clock)
    router.submit("fox", timeout_seconds=5.0)
    clock.advance(2.0)
    ranks.lose(0)
    flush(ranks)

    assert [r.timeout_seconds for r in fakes[1].requests] == [3.0]
