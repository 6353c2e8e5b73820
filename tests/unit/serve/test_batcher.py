"""The batcher without a thread: equal to the plain reference, one ending a request."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest
import torch

from nbdist.messages import GenerateRequest, Sampling
from nbdist.serve.batcher import Batcher
from nbdist.serve.native import NativeEngine
from nbdist.testing import ManualClock


class Bench:
    """A batcher and what it emitted, by request."""

    def __init__(self, model, tokenizer, **options) -> None:
        self.events = defaultdict(list)
        end_token_id = options.pop("end_token_id", 0)
        self.clock = ManualClock()
        self.batcher = Batcher(
            NativeEngine(model, **options),
            tokenizer,
            emit=lambda event: self.events[event.request_id].append(event),
            end_token_id=end_token_id,
            clock=self.clock,
        )

    def submit(self, request_id: str, prompt: str, timeout_seconds=None, **sampling) -> None:
        chosen = Sampling(**{"temperature": 0.0, "max_new_tokens": 12, **sampling})
        self.batcher.submit(
            GenerateRequest(
                request_id=request_id,
                model="m",
                prompt=prompt,
                sampling=chosen,
                timeout_seconds=timeout_seconds,
            )
        )

    def run(self) -> None:
        while self.batcher.num_requests:
            self.batcher.step()

    def text(self, request_id: str) -> str:
        return "".join(event.text for event in self.events[request_id])

    def ending(self, request_id: str):
        endings = [event for event in self.events[request_id] if event.finish_reason]
        assert len(endings) == 1, f"{request_id} has {len(endings)} endings"
        assert self.events[request_id][-1] is endings[0], "something came after the ending"
        return endings[0]


@pytest.fixture
def bench(model, tokenizer):
    return Bench(model, tokenizer)


@pytest.mark.parametrize("max_batch", [3, 8])
def test_batcher_with_mixed_lengths_and_arrivals_equals_one_at_a_time(
    model, tokenizer, greedy, prompts, max_batch
):
    rng = random.Random(max_batch)
    bench = Bench(model, tokenizer, max_batch=max_batch)
    wanted = {f"r{i}": (prompt, rng.randrange(1, 41)) for i, prompt in enumerate(prompts)}
    for request_id, (prompt, tokens) in wanted.items():
        bench.submit(request_id, prompt, max_new_tokens=tokens)
        for _ in range(rng.randrange(4)):
            bench.batcher.step()
    bench.run()

    # fp32 on the CPU: equal token by token, so the texts are equal
    assert {r: bench.text(r) for r in wanted} == {r: greedy.text(*w) for r, w in wanted.items()}
    assert {bench.ending(r).finish_reason for r in wanted} <= {"length", "stop"}
    sizes = {event.batch_size for events in bench.events.values() for event in events}
    assert max(sizes) == max_batch


def test_batcher_with_a_seed_gives_the_same_text_whatever_runs_beside(
    model, tokenizer, bench, prompts
):
    sampling = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 7, "max_new_tokens": 30}
    bench.submit("alone", "the quick", **sampling)
    bench.run()
    crowd = Bench(model, tokenizer)
    for number, prompt in enumerate(prompts[:6]):
        crowd.submit(f"r{number}", prompt, temperature=1.0, seed=number)
        crowd.batcher.step()
    crowd.submit("in a crowd", "the quick", **sampling)
    crowd.run()

    assert bench.text("alone") == crowd.text("in a crowd") != ""


def test_batcher_stops_at_a_stop_text_and_does_not_show_it(bench, greedy):
    whole = greedy.text("the lazy", 30)
    stop = whole[6:9]

    bench.submit("a", "the lazy", max_new_tokens=30, stop=(stop,))
    bench.run()

    assert bench.text("a") == whole[: whole.index(stop)]
    assert bench.ending("a").finish_reason == "stop"


def test_batcher_at_the_end_token_stops_without_its_text(model, tokenizer, greedy):
    tokens = greedy.tokens("fox", 10)
    end = next(t for t in tokens[2:] if t not in tokens[:2])
    bench = Bench(model, tokenizer, end_token_id=end)

    bench.submit("a", "fox", max_new_tokens=10)
    bench.run()

    before = tokenizer.encode("fox").ids
    expected = tokenizer.decode(before + tokens[: tokens.index(end)])[len("fox") :]
    assert (bench.text("a"), bench.ending("a").finish_reason) == (expected, "stop")


def test_batcher_at_the_end_of_the_context_ends_by_length_and_says_so(bench, tokenizer, greedy):
    prompt = "the lazy dog. " * 3
    room = 96 - len(tokenizer.encode(prompt).ids)

    bench.submit("a", prompt, max_new_tokens=500)
    bench.run()

    assert bench.text("a") == greedy.text(prompt, room)
    assert bench.ending("a").finish_reason == "length"
    assert "context of 96 tokens is full" in bench.ending("a").detail


@pytest.mark.parametrize(
    ("prompt", "sampling", "detail"),
    [
        ("", {}, "0 tokens"),
        ("the " * 200, {}, "leaves no room"),
        ("fox", {"top_p": 7.0}, "top_p=7.0"),
        ("fox", {"max_new_tokens": -3}, "max_new_tokens=-3"),
        ("fox", {"stop": (3,)}, "non-empty texts"),
    ],
)
def test_batcher_with_one_bad_request_serves_its_neighbours(
    bench, greedy, prompt, sampling, detail
):
    bench.submit("before", "the quick")
    bench.submit("bad", prompt, **sampling)
    bench.submit("after", "jumps over")
    bench.run()

    assert bench.ending("bad").finish_reason == "error"
    assert detail in bench.ending("bad").detail
    assert bench.text("before") == greedy.text("the quick", 12)
    assert bench.text("after") == greedy.text("jumps over", 12)


def test_batcher_with_a_token_that_the_model_lacks_refuses_the_request(model, tokenizer):
    model.config = type(model.config)(
        **{
            **{name: getattr(model.config, name) for name in model.config.__slots__},
            "vocab_size": 5,
        }
    )
    bench = Bench(model, tokenizer)

    bench.submit("bad", "fox")

    assert "vocab_size=5" in bench.ending("bad").detail


def test_batcher_cancel_ends_waiting_and_running_rows_at_once(model, tokenizer, greedy):
    bench = Bench(model, tokenizer, max_batch=2)
    for name in ("a", "b", "waiting"):
        bench.submit(name, "the quick")
    for _ in range(4):
        bench.batcher.step()
    bench.batcher.cancel("a")
    bench.batcher.cancel("waiting")
    bench.batcher.cancel("a")
    bench.batcher.cancel("never came")
    bench.run()

    assert bench.ending("a").finish_reason == "cancelled"
    assert bench.ending("a").index == 4
    assert bench.ending("waiting").finish_reason == "cancelled"
    assert greedy.text("the quick", 12).startswith(bench.text("a"))
    assert bench.text("b") == greedy.text("the quick", 12)


def test_batcher_cancel_gives_out_the_text_that_a_stop_text_held_back(bench, greedy):
    whole = greedy.text("the quick", 12)
    bench.submit("a", "the quick", stop=(whole + "!",))
    for _ in range(5):
        bench.batcher.step()
    assert bench.text("a") == ""

    bench.batcher.cancel("a")

    assert bench.text("a") == greedy.text("the quick", 5)


def test_batcher_with_a_failing_decode_ends_its_rows_and_goes_on(bench, model, greedy):
    bench.submit("a", "the quick")
    bench.submit("b", "brown")
    bench.batcher.step()
    broken = model.register_forward_pre_hook(lambda *_: 1 / 0)
    bench.batcher.step()
    broken.remove()
    bench.submit("c", "fox")
    bench.run()

    for name in "ab":
        assert bench.ending(name).finish_reason == "error"
        assert "ZeroDivisionError" in bench.ending(name).detail
    assert bench.text("c") == greedy.text("fox", 12)


def test_batcher_with_a_failing_prefill_spares_the_running_rows(bench, model, greedy):
    bench.submit("running", "the quick")
    bench.batcher.step()

    def fail_on_prompts(_, args):
        if args[0].shape[1] > 1:
            raise RuntimeError("no memory for this prompt")

    broken = model.register_forward_pre_hook(fail_on_prompts)
    bench.submit("joining", "brown fox jumps")
    bench.batcher.step()
    broken.remove()
    bench.submit("later", "lazy dog")
    bench.run()

    assert "no memory for this prompt" in bench.ending("joining").detail
    assert bench.text("running") == greedy.text("the quick", 12)
    assert bench.text("later") == greedy.text("lazy dog", 12)


def test_batcher_with_diverged_weights_says_so(bench, model):
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))

    bench.submit("a", "fox")
    bench.run()

    assert "the weights diverged" in bench.ending("a").detail


def test_batcher_above_its_limit_refuses_the_rest_with_the_limit(model, tokenizer):
    bench = Bench(model, tokenizer, max_batch=2, max_waiting=3)
    for number in range(8):
        bench.submit(f"r{number}", "fox")
    bench.run()

    reasons = Counter(bench.ending(f"r{number}").finish_reason for number in range(8))
    assert reasons == {"length": 5, "overloaded": 3}
    assert "max_waiting=3" in bench.ending("r7").detail


def test_batcher_with_a_request_sent_twice_runs_it_once(bench, greedy):
    bench.submit("a", "fox")
    bench.submit("a", "fox")
    bench.run()

    assert bench.ending("a").finish_reason == "length"
    assert bench.text("a") == greedy.text("fox", 12)


def test_batcher_end_all_ends_each_once(bench):
    for name in "abc":
        bench.submit(name, "fox")
    bench.batcher.step()

    bench.batcher.end_all("cancelled", "version 2 took over")

    assert {bench.ending(name).detail for name in "abc"} == {"version 2 took over"}
    assert bench.batcher.num_requests == 0
    assert bench.batcher.wait_seconds() is None


def test_batcher_ends_a_request_at_its_deadline_and_keeps_its_text(bench, greedy):
    bench.submit("late", "the quick", timeout_seconds=2.0, max_new_tokens=40)
    bench.submit("free", "the quick", max_new_tokens=40)
    for _ in range(4):
        bench.batcher.step()
    bench.clock.advance(2.0)
    bench.batcher.step()

    assert bench.ending("late").finish_reason == "timeout"
    assert "time is over, and it has 4 tokens" in bench.ending("late").detail
    assert bench.text("late") == greedy.text("the quick", 4)
    bench.run()
    assert bench.text("free") == greedy.text("the quick", 40)


def test_batcher_waits_no_longer_than_the_nearest_deadline(model, tokenizer):
    bench = Bench(model, tokenizer, window_seconds=60.0, clock=ManualClock())
    assert bench.batcher.wait_seconds() is None
    bench.submit("a", "fox", timeout_seconds=5.0)
    bench.submit("b", "fox", timeout_seconds=3.0)
    bench.clock.advance(1.0)

    assert bench.batcher.wait_seconds() == 2.0
