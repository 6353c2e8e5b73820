"""Quantised weights: the kernels against plain products, the error's bound, serving with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nbdist.errors import ServeError
from nbdist.serve import Router, serve
from nbdist.serve import quantise as module
from nbdist.serve.quantise import Int4Linear, Int8Linear, quantise, weight_bytes


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(module, "_has_kernel", lambda *_: False)


def _layer(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 48, bias=bias, dtype=dtype)


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
@pytest.mark.parametrize("bias", [True, False])
def test_kernel_equals_the_product_with_widened_weights(kind, bias, monkeypatch):
    linear = _layer(bias, torch.bfloat16)
    x = torch.randn(2, 5, 96, dtype=torch.bfloat16).transpose(0, 1)  # not contiguous

    fast = kind(linear)(x)
    monkeypatch.setattr(module, "_has_kernel", lambda *_: False)
    slow = kind(linear)(x)

    assert fast.shape == (5, 2, 48)
    # answers near 1: a bfloat16 holds 8 bits, and weights and answer are each rounded to it
    torch.testing.assert_close(fast, slow, rtol=2**-6, atol=2**-6)


def test_this_torch_has_both_kernels_where_they_are_fast():
    # if a new torch takes them away, serving goes on, but slowly: this tells
    for bits in (8, 4):
        assert module._has_kernel(bits, "cpu", torch.bfloat16)
        assert not module._has_kernel(bits, "cpu", torch.float32)


def test_many_rows_equal_few():
    layer, x = Int8Linear(_layer(dtype=torch.bfloat16)), torch.randn(40, 96, dtype=torch.bfloat16)

    few = torch.cat([layer(rows) for rows in x.split(10)])

    # as above: the many go through widened weights
    torch.testing.assert_close(layer(x), few, rtol=2**-6, atol=2**-6)


@pytest.mark.usefixtures("without_kernels")
def test_rounded_weights_are_within_half_a_step():
    linear = _layer()
    weight = linear.weight.detach()
    groups = weight.unflatten(1, (-1, 32))
    step8 = weight.abs().amax(dim=1, keepdim=True) / 127
    step4 = ((groups.amax(-1) - groups.amin(-1)) / 15)[..., None].expand_as(groups).flatten(1)

    # rounding moves a weight by half a step at most; 1 % for float32
    assert ((Int8Linear(linear).widened() - weight).abs() <= 0.505 * step8).all()
    assert ((Int4Linear(linear)._widened() - weight).abs() <= 0.505 * step4).all()


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_constant_weights_stay_as_they_are(kind):
    linear = nn.Linear(32, 16, bias=False)
    for value in (0.0, 0.5):
        nn.init.constant_(linear.weight, value)
        torch.testing.assert_close(kind(linear)(torch.eye(32)), linear.weight.T.contiguous())


def test_head_and_odd_sizes_get_8_bits_and_embeddings_stay(model):
    full = weight_bytes(model)
    quantise(model, 4)

    kinds = {name: type(m) for name, m in model.named_modules() if "Linear" in type(m).__name__}
    assert kinds.pop("head") is Int8Linear
    assert Int4Linear in kinds.values()
    assert nn.Linear not in kinds.values()
    assert isinstance(model.embedding, nn.Embedding)
    assert weight_bytes(model) < full
    assert isinstance(quantise(nn.Sequential(nn.Linear(30, 7)), 4)[0], Int8Linear)


def test_bad_bits_and_models_without_layers_are_refused():
    with pytest.raises(ValueError, match="weight_bits=3 is unknown; choose 8, 4"):
        quantise(_layer(), 3)
    with pytest.raises(ServeError, match="Embedding has no linear layer"):
        quantise(nn.Embedding(4, 4), 8)


@pytest.mark.parametrize("bits", [8, 4])
def test_served_tokens_equal_those_of_the_quantised_model_alone(bits, model, tokenizer, ranks):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    replica = serve(model, tokenizer, weight_bits=bits, engine="native", port=ranks.ports[0])
    try:
        made = Router(ranks).generate(["the quick", "lazy dog"], temperature=0.0, max_new_tokens=6)
    finally:
        replica.stop()

    for name, tensor in model.state_dict().items():  # the trained model is not the copy
        assert torch.equal(tensor, before[name])
    quantise(model, bits)
    for prompt, generation in zip(["the quick", "lazy dog"], made, strict=True):
        ids = tokenizer.encode(prompt).ids
        start = len(ids)
        with torch.inference_mode():
            for _ in range(generation.num_tokens):
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        assert generation.text == tokenizer.decode(ids[start:])
