"""Serving the very weights that are trained: one memory, versions, turns, and what it costs."""

from __future__ import annotations

import sys
import threading
from copy import deepcopy

import pytest
import torch

from nbdist.errors import ServeError
from nbdist.messages import Sampling
from nbdist.serve import Router, serve, weights
from nbdist.serve.engine import EngineRequest
from nbdist.serve.gate import Gate
from nbdist.serve.live import LiveEngine
from nbdist.serve.native import NativeEngine
from nbdist.serve.resident import shared_view
from nbdist.serve.weights import LiveWeights
from nbdist.testing import ManualClock

PROMPT = list(range(5, 45))  # two full blocks of a cache


def live(model, *, clock=None, between_steps=False):
    options = {"clock": clock} if clock else {}
    watched = LiveWeights(
        model.parameters(), is_shared=True, between_steps=between_steps, **options
    )
    return LiveEngine(NativeEngine(shared_view(model)), watched)


def request(name, num_tokens=8, prompt=PROMPT):
    sampling = Sampling(temperature=0.0, max_new_tokens=num_tokens)
    return EngineRequest(request_id=name, prompt_ids=list(prompt), sampling=sampling)


def run(engine, asked):
    engine.submit(asked)
    made = []
    while engine.num_requests:
        for output in engine.step():
            made += output.token_ids
    return made


def train(model, optimizer):
    tokens = torch.arange(64).view(2, 32) % model.config.vocab_size
    model(tokens).logsumexp(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def large_steps(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)  # the answers change


def test_a_view_has_the_same_memory_and_leaves_the_module_as_it_was(model):
    model.train()

    view = shared_view(model)

    places = [p.data_ptr() for p in model.parameters()]
    assert [p.data_ptr() for p in view.parameters()] == places
    assert model.training
    assert not view.training
    assert all(p.requires_grad for p in model.parameters())
    assert not any(p.requires_grad for p in view.parameters())


def test_after_an_update_the_same_prompt_equals_a_fresh_engine(model):
    engine, optimizer = live(model), large_steps(model)
    before = run(engine, request("a"))
    again = run(engine, request("b"))
    found = engine.stats().num_prefix_tokens
    train(model, optimizer)

    after = run(engine, request("c"))

    assert again == before
    assert found == 32  # the second prompt began with cached blocks
    assert engine.stats().num_prefix_tokens == found  # the third found none of the old weights
    assert after == run(NativeEngine(shared_view(model)), request("d")) != before


def test_weights_written_by_a_load_are_a_new_version_too(model):
    engine = live(model)
    before = run(engine, request("a"))
    model.load_state_dict({n: -t for n, t in model.state_dict().items()})

    after = run(engine, request("b"))

    assert after == run(NativeEngine(shared_view(model)), request("c")) != before


def test_a_request_that_spans_an_update_says_so_and_others_do_not(model):
    engine, optimizer = live(model), large_steps(model)
    engine.submit(request("spans", 12))
    for _ in range(3):
        engine.step()
    train(model, optimizer)
    engine.submit(request("whole", 2))
    details = {}
    while engine.num_requests:
        details |= {o.request_id: o.detail for o in engine.step() if o.finish_reason}

    assert "its answer is of both versions" in details["spans"]
    assert details["whole"] == ""


def test_between_steps_only_turns_are_used_until_training_is_over(model):
    clock = ManualClock()
    engine, optimizer = live(model, clock=clock, between_steps=True), large_steps(model)
    engine.submit(request("a", 4))
    assert len(engine.step()) == 1  # not trained yet
    train(model, optimizer)
    clock.advance(0.5)
    train(model, optimizer)

    assert engine.step() == []
    assert engine.wait_seconds() == 2.5  # five intervals
    with engine.turn():
        assert engine.wait_seconds() == 0.0
        assert len(engine.step()) == 1
    clock.advance(2.5)
    assert len(engine.step()) == 1


def test_an_update_waits_for_one_step_and_comes_before_the_next():
    gate, order = Gate(), []
    in_step, asked = threading.Event(), threading.Event()

    def serving(name):
        with gate.serving():
            order.append(name)
            if name == "first":
                in_step.set()
                asked.wait(10)

    first = threading.Thread(target=serving, args=("first",))
    first.start()
    in_step.wait(10)

    def update():
        gate.begin_update(sys._getframe())
        order.append("update")
        gate.end_update()

    updating = threading.Thread(target=update)
    updating.start()
    while not gate._num_asking:
        pass
    second = threading.Thread(target=serving, args=("second",))
    second.start()
    with gate.serving(wait=False) as mine:
        assert not mine
    asked.set()
    for thread in (first, updating, second):
        thread.join(10)

    assert order == ["first", "update", "second"]


def test_an_optimizer_that_raises_does_not_stop_the_answers(model):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no step")

    engine = live(model)
    with pytest.raises(RuntimeError, match="no step"):
        Failing(model.parameters(), lr=0.1).step()

    assert len(run(engine, request("a", 3))) == 3


def test_other_optimizers_are_not_counted(model):
    engine = live(model)
    other = torch.nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()

    assert engine.stats().num_updates == 0


def test_moved_weights_end_the_replica_with_what_to_do(model):
    engine = live(model)
    engine.submit(request("a"))
    model.double()

    with pytest.raises(ServeError, match=r"were moved to other memory.*call `serve` again"):
        engine.step()


def test_a_closed_engine_watches_no_optimizer(model):
    engine, optimizer = live(model), large_steps(model)
    engine.close()
    train(model, optimizer)

    assert engine.weights.num_updates == 0


def plain_training(model, num_steps=4):
    torch.manual_seed(0)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(num_steps):
        train(model, optimizer)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("when", ["beside", "between_steps"])
def test_prompts_are_answered_while_training_that_stays_the_same_bit_by_bit(
    model, tokenizer, one_rank, when
):
    alone = plain_training(deepcopy(model))
    replica = serve(
        model, tokenizer, share=True, when=when, steps_between=2, port=one_rank.ports[0]
    )
    router = Router(one_rank)
    running = [router.submit("the fox", temperature=1.0, max_new_tokens=40) for _ in range(6)]

    beside = plain_training(model)

    assert all(generation.wait(30) for generation in running)
    assert {g.finish_reason for g in running} <= {"length", "stop"}
    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))
    stats = router.stats()[0]
    assert stats.num_updates == 4
    assert stats.held_seconds > 0
    assert stats.held_fraction > 0
    replica.stop()


def test_turns_answer_on_the_thread_that_trains(model, tokenizer, one_rank, monkeypatch):
    monkeypatch.setattr(weights, "_PATIENCE_SECONDS", 60.0)  # however busy the machine is
    replica = serve(
        model,
        tokenizer,
        share=True,
        when="between_steps",
        steps_between=3,
        window_seconds=0,
        port=one_rank.ports[0],
    )
    optimizer = large_steps(model)
    train(model, optimizer)
    seen = []
    step = NativeEngine.step
    monkeypatch.setattr(
        NativeEngine,
        "step",
        lambda self: seen.append(threading.current_thread()) or step(self),
    )
    router = Router(one_rank)
    asked = router.submit("the fox", temperature=0.0, max_new_tokens=5)
    for _ in range(200):
        train(model, optimizer)
        if asked.finish_reason:
            break

    assert asked.wait(20)
    assert set(seen) == {threading.main_thread()}
    replica.stop()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"share": True, "weight_bits": 8}, "rounds a whole copy"),
        ({"share": True, "engine": "reference"}, "cannot be told when to run"),
        ({"share": True, "tp": 2}, "leave tp out"),
        ({"tp": 0}, "set tp >= 1"),
        ({"tp": 2, "speculation": "ngram"}, "leave one of the two out"),
        ({"tp": 2}, "tp=2 was asked for on 1 ranks"),
        ({"when": "later"}, "set 'beside' or 'between_steps'"),
        ({"steps_between": 0}, "set steps_between >= 1"),
    ],
)
def test_what_does_not_go_together_is_refused(model, tokenizer, one_rank, options, text):
    with pytest.raises(ValueError, match=text):
        serve(model, tokenizer, port=one_rank.ports[0], **options)
