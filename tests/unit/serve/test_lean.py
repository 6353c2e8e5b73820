"""The lean forward: the logits of transformers' own, or none."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from nbdist.serve import lean
from nbdist.serve.adapt import adapted
from nbdist.serve.quantise import quantise

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILY = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, attention_bias=True)),
    "llama3": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE)),
    "tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SHAPE, sliding_window=8)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SHAPE)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE, head_dim=24)),
}


def made(name: str):
    torch.manual_seed(0)
    model = FAMILY[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1).add_(0.1 * torch.rand(parameter.shape))
    return model


def lean_of(model) -> lean.LeanForward | None:
    return adapted(model)._lean


def logits_of(forward: lean.LeanForward, tokens: torch.Tensor) -> torch.Tensor:
    places = torch.arange(tokens.shape[1])
    return forward(tokens, places[None], lean._Causal(), places)


@pytest.mark.parametrize("name", list(FAMILY))
@pytest.mark.parametrize("num_tokens", [5, 40])  # below and above where the weight goes first
@torch.inference_mode()
def test_lean_forward_gives_the_logits_of_the_models_own(name, num_tokens):
    model = made(name)
    forward = lean_of(model)
    tokens = torch.arange(num_tokens)[None] * 11 % 97
    wanted = adapted(model).plain(tokens)[0]

    assert forward is not None
    # float32: the same numbers, summed in another order, over two layers
    close = {"rtol": 1e-4, "atol": 1e-5 * float(wanted.abs().max())}
    torch.testing.assert_close(logits_of(forward, tokens), wanted, **close)


@torch.inference_mode()
def test_lean_forward_reads_the_weights_as_they_are_now():
    model = made("llama")
    forward = lean_of(model)
    tokens = torch.arange(8)[None]
    before = logits_of(forward, tokens)
    model.model.layers[0].mlp.down_proj.weight.mul_(-1)

    now = logits_of(forward, tokens)
    assert not torch.allclose(now, before)
    torch.testing.assert_close(now, adapted(model).plain(tokens)[0], rtol=1e-4, atol=1e-3)


@torch.inference_mode()
def test_lean_forward_runs_rounded_weights():
    model = quantise(made("llama"), 8)
    forward = lean_of(model)
    tokens = torch.arange(8)[None]

    assert forward is not None
    wanted = adapted(model).plain(tokens)[0]
    torch.testing.assert_close(logits_of(forward, tokens), wanted, rtol=1e-4, atol=1e-3)


def test_lean_forward_leaves_a_model_of_other_arithmetic_alone(monkeypatch):
    model = made("llama")
    own = model.model.layers[1].mlp.forward
    monkeypatch.setattr(model.model.layers[1].mlp, "forward", lambda x: 0.5 * own(x))

    assert lean_of(model) is None


def test_lean_forward_leaves_a_model_with_hooks_alone():
    model = made("llama")
    model.model.layers[0].register_forward_hook(lambda *_: None)

    assert lean_of(model) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_product_with_the_weight_first_equals_the_plain_one(dtype, bias):
    torch.manual_seed(1)
    linear = torch.nn.Linear(48, 80, bias=bias, dtype=dtype)
    x = torch.randn(20, 48, dtype=dtype)

    # one sum of 48 products in another order; bfloat16 keeps 8 bits
    close = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(lean._linear(linear, x), linear(x), rtol=close, atol=close)
