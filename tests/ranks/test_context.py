"""Context parallelism on real ranks: the ring alone, evaluation, and what it refuses."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from nbdist.testing import run_ranks
from nbdist.train import (
    DecoderConfig,
    DecoderLM,
    MeshConfig,
    TextData,
    TrainConfig,
    Trainer,
    build_mesh,
    parallelize,
    shakespeare,
)
from nbdist.train.parallelize.ring import ring_attention


def _ring(rank, is_causal):
    generator = torch.Generator().manual_seed(4)
    shape = (2, 3, 9, 4)
    whole = [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    ]
    wanted = scaled_dot_product_attention(*whole, is_causal=is_causal)
    weights = torch.randn(shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad((wanted * weights).sum(), whole)
    mine = [t.detach().chunk(3, 2)[rank].clone().requires_grad_() for t in whole]
    found = ring_attention(*mine, dist.group.WORLD, is_causal=is_causal, scale=0.5)
    own = torch.autograd.grad((found * weights.chunk(3, 2)[rank]).sum(), mine)
    pairs = [(found, wanted), *zip(own, gradients, strict=True)]
    return [float((a - b.chunk(3, 2)[rank]).detach().abs().max()) for a, b in pairs]


@pytest.mark.parametrize("is_causal", [True, False])
def test_ring_equals_attention_over_all_tokens_forward_and_backward(is_causal):
    for differences in run_ranks(_ring, 3, is_causal):
        assert max(differences) < 1e-13  # float64, sums in another order


def _decoder():
    config = DecoderConfig(vocab_size=280, num_layers=1, hidden_size=16, context_length=12)
    return DecoderLM(config).double()


def _trainer(model):
    data = TextData(shakespeare()[:8000], vocab_size=280, context_length=12)
    return Trainer(model, data, TrainConfig(num_steps=1, global_batch_size=4))


def _use(rank):
    mesh = build_mesh(MeshConfig(cp=2))
    model = parallelize(_decoder(), mesh)
    tokens = torch.arange(12)[None]
    whole = _decoder()(tokens)
    found = model(tokens)
    difference = float((found - whole.chunk(2, 1)[rank]).detach().abs().max())
    texts = {}
    for name, ask in {
        "rows": lambda: model(torch.zeros(1, 5, dtype=torch.long)),
        "positions": lambda: model(tokens, tokens),
        "model": lambda: parallelize(torch.nn.Linear(2, 2), mesh),
        "mask": lambda: model.layers[0](
            torch.zeros(1, 6, 16).double(), torch.ones(()), torch.zeros(()), _Cache()
        ),
    }.items():
        try:
            ask()
        except ValueError as error:
            texts[name] = str(error)
    return difference, texts, _trainer(model).evaluate()


class _Cache:
    def attend(self, layer_index, query, key, value):
        mask = torch.ones(6, 6, dtype=torch.bool)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask)


def test_rank_computes_its_tokens_and_misuse_is_refused():
    expected = run_ranks(_evaluate_whole, 1)[0]
    for difference, texts, validation in run_ranks(_use, 2):
        assert difference < 1e-13
        assert validation == pytest.approx(expected, abs=1e-12)
        assert "rows of 5 tokens cannot be cut evenly over cp=2" in texts["rows"]
        assert "call it with tokens alone" in texts["positions"]
        assert "set cp=1, or pp=1 and a DecoderLM" in texts["model"]
        assert "with a mask or dropout" in texts["mask"]


def _evaluate_whole(rank):
    return _trainer(_decoder()).evaluate()
