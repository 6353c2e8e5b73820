"""What the native engine does beyond the conformance suite: models, fairness, memory, probes."""

from __future__ import annotations

import random

import pytest
import torch
import transformers as hf

from nbdist.errors import ServeError
from nbdist.messages import Sampling
from nbdist.serve.adapt import adapted
from nbdist.serve.engine import EngineRequest
from nbdist.serve.engines import make_engine
from nbdist.serve.native import NativeEngine
from nbdist.serve.reference import continue_alone

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA = {**SHAPE, "intermediate_size": 64, "num_key_value_heads": 2}
FAMILIES = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, attention_bias=True)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**LLAMA)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**LLAMA, sliding_window=8)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLAMA)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**LLAMA, sliding_window=8, head_dim=8)
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**SHAPE)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SHAPE, intermediate_size=64)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**SHAPE, ffn_dim=64, word_embed_proj_dim=32, pad_token_id=None)
    ),
}


def family(name: str):
    torch.manual_seed(0)
    made = FAMILIES[name]().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return made


def greedy(request_id: str, prompt_ids: list[int], tokens: int = 12) -> EngineRequest:
    sampling = Sampling(temperature=0.0, max_new_tokens=tokens)
    return EngineRequest(request_id=request_id, prompt_ids=prompt_ids, sampling=sampling)


def finish(engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.num_requests:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def alone(model, request: EngineRequest) -> list[int]:
    return continue_alone(adapted(model), request, request.sampling.max_new_tokens)[0]


@pytest.mark.parametrize("name", list(FAMILIES))
def test_native_runs_a_family_of_transformers_as_the_model_alone_does(name):
    model, rng = family(name), random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(6)]
    requests = [greedy(f"r{n}", prompt) for n, prompt in enumerate(prompts)]
    engine = NativeEngine(model, max_batch=4, max_step_tokens=24, cache_tokens=200)
    for request in requests:
        engine.submit(request)

    assert finish(engine) == {r.request_id: alone(model, r) for r in requests}


def test_native_refuses_a_model_without_attention_and_auto_takes_the_reference():
    config = hf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4)
    model = hf.MambaForCausalLM(config).eval()

    with pytest.raises(ServeError, match="engine='reference'"):
        make_engine("native", model)


def test_native_with_random_mixtures_and_little_cache_equals_each_alone(model):
    for seed in range(2):
        rng = random.Random(seed)
        engine = NativeEngine(
            model,
            max_batch=rng.randrange(1, 7),
            max_step_tokens=rng.choice([3, 16, 64]),
            block_size=rng.choice([1, 4, 16]),
            cache_tokens=rng.choice([112, 160, 400]),
        )
        made: dict[str, list[int]] = {}
        requests = []
        for number in range(10):
            size = rng.randrange(1, 60)
            prompt = [rng.randrange(3) for _ in range(size)]
            requests.append(greedy(f"r{number}", prompt, rng.randrange(1, 30)))
            engine.submit(requests[-1])
            for _ in range(rng.randrange(4)):
                for output in engine.step():
                    made.setdefault(output.request_id, []).extend(output.token_ids)
        for request_id, tokens in finish(engine).items():
            made.setdefault(request_id, []).extend(tokens)

        assert made == {r.request_id: alone(model, r) for r in requests}
        assert engine.pool.num_used == 0


def test_native_gives_every_decoder_a_token_in_each_step_beside_a_long_prompt(model):
    engine = NativeEngine(model, max_step_tokens=8)
    for name in ("a", "b"):
        engine.submit(greedy(name, [1, 2], 40))
    engine.step()
    engine.submit(greedy("long", [1, 2, 3] * 20, 2))

    for _ in range(6):
        assert {output.request_id for output in engine.step()} == {"a", "b"}


def test_native_with_near_full_cache_preempts_a_bounded_number_of_times(model):
    engine = NativeEngine(model, max_batch=8, cache_tokens=112, block_size=4)
    for number in range(24):
        engine.submit(greedy(f"r{number}", [number] * 8, 20))
    finish(engine)

    assert engine.stats().num_preempted <= 24


def test_native_shares_the_start_of_prompts(model):
    engine = NativeEngine(model, block_size=4)
    start = list(range(30))
    engine.submit(greedy("a", [*start, 1]))
    engine.step()
    engine.submit(greedy("b", [*start, 2]))
    engine.step()

    stats = engine.stats()
    assert stats.num_prefix_tokens == 28
    assert stats.shared_bytes == 28 * stats.capacity_bytes // engine.limits.capacity_tokens
    assert finish(engine).keys() == {"a", "b"}


def test_native_counts_the_bytes_of_both_layouts_by_their_formulas(model):
    engine = NativeEngine(model, block_size=16)
    sizes = [5, 20, 47]
    for number, size in enumerate(sizes):
        engine.submit(greedy(f"r{number}", [number] * size))
    engine.step()

    config = model.config
    token = 2 * config.num_layers * config.num_kv_heads * config.head_size * 4
    stats = engine.stats()
    assert stats.used_bytes == token * sum(sizes)
    assert stats.paged_bytes == token * 16 * sum(-(-size // 16) for size in sizes)
    assert stats.contiguous_bytes == token * config.context_length * len(sizes)
    assert stats.paged_waste_fraction == pytest.approx(1 - 72 / (16 * 6))
    assert stats.contiguous_waste_fraction == pytest.approx(1 - 72 / (96 * 3))


def test_native_marks_an_answer_that_two_versions_made(model):
    engine = NativeEngine(model)
    engine.submit(greedy("a", [1, 2]))
    engine.step()
    engine.new_version()
    endings = []
    while engine.num_requests:
        endings += [output for output in engine.step() if output.finish_reason]

    assert "the weights changed while this request ran" in endings[0].detail


def test_native_after_a_row_with_numbers_that_are_not_finite_serves_the_next(model):
    engine = NativeEngine(model, cache_tokens=96, block_size=16)
    good = greedy("good", [1, 2, 3])
    weight = model.layers[0].attention.value.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("inf"))
    engine.submit(greedy("bad", [5] * 40))
    [ending] = engine.step()
    with torch.no_grad():
        weight.copy_(kept)
    engine.submit(good)

    assert "not finite" in ending.detail
    assert finish(engine)["good"] == alone(model, good)


def test_probe_refuses_an_engine_that_gives_other_tokens(model, monkeypatch):
    from nbdist.serve import pages

    attend = pages.PackedStep.attend

    def forgetful(step, layer_index, query, key, value, **options):
        return attend(step, layer_index, query, key, value * 0.5, **options)

    monkeypatch.setattr(pages.PackedStep, "attend", forgetful)

    with pytest.raises(ServeError, match="was probed with a prompt of 20 tokens"):
        make_engine("native", model)
    assert make_engine("auto", model).name == "reference"


def test_make_engine_with_an_unknown_name_lists_the_known(model):
    with pytest.raises(ValueError, match="'native', 'hf', 'vllm' or 'reference'"):
        make_engine("other", model)
