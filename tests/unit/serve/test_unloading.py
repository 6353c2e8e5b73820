"""What is served and its end: drained or cancelled, told to every router, memory given back."""

from __future__ import annotations

import threading

import pytest

from nbdist.errors import Overloaded, ServeError
from nbdist.messages import GenerateRequest, ModelServed, TokenEvent, UnloadModels
from nbdist.serve import Router, serve
from nbdist.serve.loopback import LoopbackRanks
from nbdist.serve.unloading import served_models, unload

LONG = {"temperature": 0.0, "max_new_tokens": 90}
SHORT = {"temperature": 0.0, "max_new_tokens": 4}


class Gate:
    """Holds a replica's engine before its next step."""

    def __init__(self, monkeypatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        from nbdist.serve.native import NativeEngine

        step = NativeEngine.step

        def gated(engine):
            if threading.current_thread().name.startswith("nbdist-serve"):
                self.reached.set()
                assert self.opened.wait(20), "the gate was not opened"
            return step(engine)

        monkeypatch.setattr(NativeEngine, "step", gated)


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def in_thread(function, *args, **named):
    """Run a function beside the test; `.join()` returns what it returned."""
    made = []
    thread = threading.Thread(target=lambda: made.append(function(*args, **named)), daemon=True)
    thread.start()

    def join():
        thread.join(20)
        assert made, "it has not returned"
        return made[0]

    return join


def wait_until_draining(router: Router) -> None:
    with router._changed:
        assert router._changed.wait_for(
            lambda: all(s.state == "draining" for s in router.replicas.values()), 20
        )


def test_list_of_what_is_served_goes_by_model_and_rank(model, tokenizer, ranks):
    for name, port in (("b", 0), ("a", 1), ("a", 0)):
        serve(model, tokenizer, name, port=ranks.ports[port])

    listed = served_models(ranks)

    assert [(one.model, one.rank) for one in listed] == [("a", 0), ("a", 1), ("b", 0)]
    assert {one.state for one in listed} == {"serving"}
    weights = sum(p.nbytes for p in model.parameters())
    assert all(one.weights_bytes >= weights for one in listed)
    assert all(one.stats.capacity_bytes > 0 for one in listed)
    assert set(unload(ranks)) == {0, 1}
    assert served_models(ranks) == []


def test_unload_finishes_what_runs_and_takes_nothing_new(model, tokenizer, one_rank, gate, greedy):
    serve(model, tokenizer, port=one_rank.ports[0])
    router, other = Router(one_rank), Router(one_rank)
    running = router.submit("fox", **SHORT)
    assert gate.reached.wait(20)

    done = in_thread(router.unload)
    for one in (router, other):
        wait_until_draining(one)
        with pytest.raises(Overloaded, match="being drained"):
            one.submit("fox", **SHORT)
    gate.opened.set()

    assert done()[0].models == ("default",)
    assert running.result(20) == greedy.text("fox", 4)
    assert one_rank.ports[0].handlers == {}
    for one in (router, other):
        with pytest.raises(ServeError, match="no model named 'default' is served"):
            one.submit("fox")


def test_unload_now_cancels_what_runs_and_what_drains(model, tokenizer, one_rank, gate):
    serve(model, tokenizer, port=one_rank.ports[0])
    router = Router(one_rank)
    running = [router.submit("fox", **LONG) for _ in range(3)]
    assert gate.reached.wait(20)
    drained = in_thread(unload, one_rank)
    wait_until_draining(router)

    done = in_thread(unload, one_rank, now=True)
    gate.opened.set()

    assert done()[0].models == ("default",)
    assert drained()[0].models == ("default",)
    assert all(generation.wait(20) for generation in running)
    assert {g.finish_reason for g in running} == {"cancelled"}
    assert "was unloaded" in running[0].detail


def test_request_cancelled_while_its_replica_drains_ends_the_wait(model, tokenizer, one_rank, gate):
    serve(model, tokenizer, port=one_rank.ports[0])
    router = Router(one_rank)
    running = router.submit("fox", **LONG)
    assert gate.reached.wait(20)
    done = in_thread(unload, one_rank)
    wait_until_draining(router)

    running.cancel()
    gate.opened.set()

    assert done()[0].models == ("default",)
    assert running.finish_reason == "cancelled"


def test_unload_with_too_little_time_says_where_requests_run(model, tokenizer, one_rank, gate):
    serve(model, tokenizer, port=one_rank.ports[0])
    running = Router(one_rank).submit("fox", **SHORT)
    assert gate.reached.wait(20)

    with pytest.raises(ServeError, match=r"take 0 s, but requests still run on ranks \[0\]"):
        unload(one_rank, timeout_seconds=0.0)
    assert [one.state for one in served_models(one_rank)] == ["draining"]
    gate.opened.set()

    assert running.wait(20)


def test_unload_of_one_model_leaves_the_other(model, tokenizer, one_rank, greedy):
    for name in ("a", "b"):
        serve(model, tokenizer, name, port=one_rank.ports[0])
    a, b = Router(one_rank, "a"), Router(one_rank, "b")

    answer = a.unload()[0]

    assert answer.models == ("a",)
    assert min(answer.host_bytes) > 0
    assert b.submit("fox", **SHORT).result(20) == greedy.text("fox", 4)
    with pytest.raises(ServeError, match="no model named 'a' is served"):
        a.submit("fox")
    with pytest.raises(ServeError, match="model 'a' was to be unloaded, but no rank serves it"):
        unload(one_rank, "a")
    unload(one_rank)


def test_unload_passes_by_ranks_that_are_lost_or_serve_nothing(model, tokenizer):
    with LoopbackRanks(3) as ranks:
        serve(model, tokenizer, port=ranks.ports[2])
        ranks.lose(0)

        assert list(unload(ranks)) == [2]
        with pytest.raises(ServeError, match="every model was to be unloaded, but no rank"):
            unload(ranks)


def test_model_served_again_after_its_unload_is_used_by_old_routers(
    model, tokenizer, one_rank, greedy
):
    serve(model, tokenizer, port=one_rank.ports[0])
    router = Router(one_rank)
    unload(one_rank)

    again = serve(model, tokenizer, port=one_rank.ports[0])
    router.refresh()

    assert router.replicas[0].version == 2
    assert router.submit("fox", **SHORT).result(20) == greedy.text("fox", 4)
    again.stop()


def test_model_served_anew_over_a_draining_one_takes_requests(model, tokenizer, one_rank, gate):
    serve(model, tokenizer, port=one_rank.ports[0])
    router = Router(one_rank)
    running = router.submit("fox", **LONG)
    assert gate.reached.wait(20)
    done = in_thread(unload, one_rank)
    wait_until_draining(router)

    gate.opened.set()
    serve(model, tokenizer, port=one_rank.ports[0])
    assert done()[0].models == ("default",)
    router.refresh()

    assert running.wait(20)
    assert router.submit("fox", **SHORT).wait(20)
    unload(one_rank)


def test_rank_asked_by_a_stranger_while_it_drains_says_so(model, tokenizer, one_rank, gate):
    serve(model, tokenizer, port=one_rank.ports[0])
    router = Router(one_rank)
    running = router.submit("fox", **SHORT)
    assert gate.reached.wait(20)
    done = in_thread(unload, one_rank)
    wait_until_draining(router)
    told, arrived = [], threading.Event()
    one_rank.subscribe(TokenEvent, lambda _, e: (told.append(e), arrived.set()))

    one_rank.post(0, GenerateRequest(request_id="late", model="default", prompt="fox"))
    assert arrived.wait(20)
    gate.opened.set()
    done()

    assert told[0].finish_reason == "replica_lost"
    assert "is being unloaded on rank 0" in told[0].detail
    assert running.wait(20)


def test_replica_that_stops_is_told_to_routers_at_once(model, tokenizer, ranks):
    first, second = (serve(model, tokenizer, port=port) for port in ranks.ports)
    router = Router(ranks)

    first.stop()

    with router._changed:
        assert router._changed.wait_for(lambda: list(router.replicas) == [1], 20)
    second.stop()


def test_unload_message_survives_the_wire_with_no_model():
    from nbdist.messages import from_wire, to_wire

    order = UnloadModels(query_id="q", model=None, now=True)
    assert from_wire(to_wire(order)) == order


def test_rank_answers_for_a_model_that_it_does_not_serve(model, tokenizer, one_rank):
    replica = serve(model, tokenizer, "a", port=one_rank.ports[0])
    heard, arrived = [], threading.Event()
    one_rank.subscribe(
        ModelServed, lambda _, e: e.model == "b" and (heard.append(e), arrived.set())
    )

    # without the answer this would wait for all of `query_seconds`
    with pytest.raises(ServeError, match="no model named 'b'"):
        Router(one_rank, "b", query_seconds=60.0)

    assert arrived.wait(20)
    assert heard[0].state == "gone"
    replica.stop()
