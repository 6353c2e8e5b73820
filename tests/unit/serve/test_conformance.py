"""One suite for all engines: the same tokens, one ending, faults that stay with their request."""

from __future__ import annotations

import importlib.util
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nbdist.errors import Overloaded
from nbdist.messages import Sampling
from nbdist.serve.adapt import adapted
from nbdist.serve.engine import EngineRequest
from nbdist.serve.hugging import HuggingFaceEngine
from nbdist.serve.native import NativeEngine
from nbdist.serve.reference import ReferenceEngine, continue_alone
from nbdist.serve.vllm import VllmEngine

VOCAB = 97


def make_llama(seed: int = 0) -> LlamaForCausalLM:
    """A tiny Llama whose choices differ from token to token."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's CPU kernel takes nothing smaller
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return made


ENGINES = {
    "reference": ReferenceEngine,
    "native": NativeEngine,
    "hf": HuggingFaceEngine,
    "vllm": VllmEngine,
}


@pytest.fixture(params=list(ENGINES))
def make_engine(request):
    """Build an engine of one kind; closed at the end."""
    if request.param == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed; test_vllm.py runs the engine over a stand-in")
    made = []

    def make(model=None, **options):
        made.append(ENGINES[request.param](model or make_llama(), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def make_sampling_engine(make_engine, request):
    if request.node.callspec.params["make_engine"] == "hf":
        pytest.skip("transformers' batching samples all requests with one generator")
    return make_engine


def wanted(request: EngineRequest, model=None) -> list[int]:
    """The tokens of a request alone: no cache, no batch."""
    room = min(request.sampling.max_new_tokens, 128 - len(request.prompt_ids))
    return continue_alone(adapted(model or make_llama()), request, room)[0]


def greedy(request_id: str, prompt_ids: list[int], tokens: int = 12, **more) -> EngineRequest:
    sampling = Sampling(temperature=0.0, max_new_tokens=tokens)
    return EngineRequest(request_id=request_id, prompt_ids=prompt_ids, sampling=sampling, **more)


class Run:
    """Drives an engine and keeps what it made."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.endings: dict[str, list] = {}

    def step(self) -> None:
        for output in self.engine.step():
            assert not self.endings.get(output.request_id), "something came after the ending"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                self.endings.setdefault(output.request_id, []).append(output)

    def finish(self) -> None:
        while self.engine.num_requests:
            self.step()

    def reason(self, request_id: str) -> str:
        [ending] = self.endings[request_id]
        return ending.finish_reason


def mixture(seed: int, number: int = 9) -> list[EngineRequest]:
    rng = random.Random(seed)
    return [
        greedy(f"r{n}", [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 50))], 1 + n * 2)
        for n in range(number)
    ]


def test_engine_in_every_mixture_equals_each_request_alone(make_engine):
    rng = random.Random(4)
    run = Run(make_engine(max_batch=4))
    requests = mixture(4)
    for request in requests:
        run.engine.submit(request)
        for _ in range(rng.randrange(3)):
            run.step()
    run.finish()

    # float32 on the CPU: the same arithmetic up to its order, so the same tokens
    assert run.tokens == {r.request_id: wanted(r) for r in requests}
    assert {run.reason(r.request_id) for r in requests} == {"length"}


def test_engine_stops_at_the_end_token_which_comes_last(make_engine):
    plain = wanted(greedy("a", [5, 6, 7], 20))
    end = next(token for token in plain[3:] if token not in plain[:3])
    run = Run(make_engine())

    run.engine.submit(greedy("a", [5, 6, 7], 20, end_token_id=end))
    run.finish()

    assert run.tokens["a"] == plain[: plain.index(end) + 1]
    assert run.reason("a") == "stop"


def test_engine_with_a_cache_for_a_few_finishes_all_and_loses_nothing(make_engine, request):
    if request.node.callspec.params["make_engine"] == "reference":
        pytest.skip("it keeps no cache")
    run = Run(make_engine(max_batch=6, cache_tokens=144))
    requests = mixture(3)
    for one in requests:
        run.engine.submit(one)
    run.finish()

    assert run.tokens == {r.request_id: wanted(r) for r in requests}


def test_engine_cuts_an_answer_at_the_end_of_the_context(make_engine):
    run = Run(make_engine())
    run.engine.submit(greedy("a", [3] * 120, 500))
    run.finish()

    assert len(run.tokens["a"]) == 8
    assert run.reason("a") == "length"


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ([], "0 tokens"),
        ([VOCAB], "vocab_size=97"),
        ([1, -1], "vocab_size=97"),
        ([1] * 128, "leaves no room"),
    ],
)
def test_engine_refuses_a_prompt_that_cannot_run_and_serves_its_neighbours(make_engine, bad, text):
    run = Run(make_engine())
    good = mixture(1, 3)
    run.engine.submit(good[0])
    run.step()
    with pytest.raises(ValueError, match=text):
        run.engine.submit(greedy("bad", bad))
    for one in good[1:]:
        run.engine.submit(one)
    run.finish()

    assert run.tokens == {r.request_id: wanted(r) for r in good}


def test_engine_refuses_a_prompt_beyond_its_cache(make_engine, request):
    if request.node.callspec.params["make_engine"] == "reference":
        pytest.skip("it keeps no cache")
    engine = make_engine(cache_tokens=64)

    with pytest.raises(ValueError, match="engine's cache of"):
        engine.submit(greedy("a", [1] * 70))
    assert engine.num_requests == 0


def test_engine_refuses_an_id_that_runs_and_goes_on(make_engine):
    run = Run(make_engine())
    run.engine.submit(greedy("a", [1, 2]))
    with pytest.raises(ValueError, match="'a' is already running"):
        run.engine.submit(greedy("a", [3]))
    run.finish()

    assert run.tokens["a"] == wanted(greedy("a", [1, 2]))


def test_engine_lets_go_of_a_cancelled_request_and_serves_the_rest(make_engine):
    run = Run(make_engine(max_batch=2))
    for name in "abc":
        run.engine.submit(greedy(name, [1, 2, ord(name) % VOCAB], 40))
    assert run.engine.cancel("b")
    assert not run.engine.cancel("b")
    run.finish()

    assert set(run.endings) == {"a", "c"}
    assert run.engine.wait_seconds() is None


def test_engine_above_its_limit_says_so(make_engine):
    engine = make_engine(max_batch=1, max_waiting=1)
    engine.submit(greedy("a", [1]))
    engine.submit(greedy("b", [1]))

    with pytest.raises(Overloaded, match=r"max_batch=1 \+ max_waiting=1"):
        engine.submit(greedy("c", [1]))


def test_engine_after_new_weights_equals_a_fresh_one(make_engine):
    model, prompt = make_llama(), list(range(40))
    run = Run(make_engine(model))
    run.engine.submit(greedy("old", prompt))
    run.finish()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-1)
    run.engine.new_version()
    run.engine.submit(greedy("new", prompt))
    run.finish()

    fresh = make_llama()
    with torch.no_grad():
        fresh.model.layers[0].self_attn.k_proj.weight.mul_(-1)
    assert run.tokens["new"] == wanted(greedy("new", prompt), fresh) != run.tokens["old"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "seed": 7},
        {"temperature": 1.3, "seed": 7, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.7},
        {"temperature": 1.0, "seed": 1, "presence_penalty": 2.0},
    ],
)
def test_engine_samples_by_the_request_alone_whatever_runs_beside(
    make_sampling_engine, sampling, request
):
    kind = request.node.callspec.params["make_engine"]
    if kind == "vllm" and sampling["temperature"]:
        pytest.skip("vLLM draws other numbers for a seed than the reference does")
    run = Run(make_sampling_engine(max_batch=4))
    asked = EngineRequest(
        request_id="a", prompt_ids=[4, 5, 6], sampling=Sampling(max_new_tokens=25, **sampling)
    )
    for one in mixture(2, 5):
        run.engine.submit(one)
    run.step()
    run.engine.submit(asked)
    run.finish()

    assert run.tokens["a"] == wanted(asked)


def test_engine_reports_the_logprobs_of_what_it_chose(make_sampling_engine):
    run = Run(make_sampling_engine())
    sampling = Sampling(temperature=0.0, max_new_tokens=1, logprobs=2)
    run.engine.submit(EngineRequest(request_id="a", prompt_ids=[4, 5], sampling=sampling))
    run.finish()

    [ending] = run.endings["a"]
    [seen] = ending.logprobs
    plain = torch.log_softmax(make_llama()(torch.tensor([[4, 5]])).logits[0, -1].detach(), -1)
    best = plain.topk(2)
    assert (seen.token_id, seen.top_ids) == (int(plain.argmax()), tuple(best.indices.tolist()))
    # float32 sums in another order
    assert seen.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)


def test_hf_engine_whose_thread_ends_gives_its_requests_to_a_new_one(monkeypatch):
    engine = HuggingFaceEngine(make_llama())
    run = Run(engine)
    requests = mixture(4, 5)
    for one in requests:
        engine.submit(one)
    while not run.tokens:
        run.step()
    engine._manager.add_request([VOCAB + 5], request_id="poison")
    run.finish()
    engine.close()

    assert engine.num_restarts >= 1
    assert run.tokens == {r.request_id: wanted(r) for r in requests}


def test_hf_engine_ends_a_request_that_failed_alone_and_serves_the_rest():
    engine = HuggingFaceEngine(make_llama())
    run = Run(engine)
    good, bad = greedy("good", [1, 2]), greedy("bad", [3, 4], 100)
    engine.submit(good)
    engine.submit(bad)
    engine._rows[engine._ids["bad"]].error = "it was not to be"
    run.finish()
    engine.close()

    assert run.tokens["good"] == wanted(good)
    assert run.reason("bad") == "error"
    assert "it was not to be" in run.endings["bad"][0].detail


def test_hf_engine_refuses_what_it_cannot_sample_and_names_the_one_that_can():
    engine = HuggingFaceEngine(make_llama())

    with pytest.raises(ValueError, match="engine='native'"):
        engine.submit(
            EngineRequest(request_id="a", prompt_ids=[1], sampling=Sampling(temperature=1.0))
        )
    engine.close()
