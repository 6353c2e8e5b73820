"""The mixture of experts: routing, capacity, balance, and what it refuses."""

import pytest
import torch
from torch.nn import functional

from nbdist.train import DecoderConfig, DecoderLM, MixtureOfExperts
from nbdist.train.models import auxiliary_loss


def _layer(**options):
    torch.manual_seed(0)
    return MixtureOfExperts(8, 16, 4, **options).double()


def _rows(rows=2, tokens=6):
    return torch.randn(rows, tokens, 8, dtype=torch.float64)


def test_output_is_the_weighted_sum_of_the_best_experts():
    layer, x = _layer(), _rows()

    found = layer(x)

    scores = functional.softmax(layer.router(x), dim=-1)
    experts = layer.experts
    for row in range(2):
        for token in range(6):
            best = scores[row, token].topk(2)
            weights = best.values / best.values.sum()
            expected = 0
            for weight, e in zip(weights, best.indices, strict=True):
                hidden = functional.silu(x[row, token] @ experts.gate[e])
                hidden = hidden * (x[row, token] @ experts.up[e])
                expected = expected + weight * (hidden @ experts.down[e])
            torch.testing.assert_close(found[row, token], expected, atol=1e-14, rtol=0)
    assert int(layer.num_dropped) == 0
    assert int(layer.load.sum()) == 2 * 6 * 2


def test_pairs_beyond_capacity_are_dropped_and_counted_row_by_row():
    layer, x = _layer(experts_per_token=1, capacity_factor=1.0), _rows(tokens=8)
    with torch.no_grad():
        layer.router.weight.zero_()  # equal scores: every token takes the same expert

    found = layer(x)

    assert int(layer.num_dropped) == 2 * (8 - 2)  # room for 8 / 4 pairs an expert and row
    assert layer.load.max() == 2 * 2
    assert torch.equal(found[:, 2:], torch.zeros_like(found[:, 2:]))
    assert found[:, :2].abs().sum() > 0
    layer.eval()(x)
    assert int(layer.num_dropped) == 0


def test_first_choices_find_room_before_second_ones():
    layer = _layer(capacity_factor=1.0)
    chosen = torch.tensor([[[1, 0], [2, 0], [0, 1], [0, 2]]])  # (B, T, K): rooms for 2 pairs
    picked = functional.one_hot(chosen, 4)

    kept = layer._within_capacity(picked)

    assert kept.tolist() == [[[True, False], [True, False], [True, True], [True, True]]]


def test_balance_loss_is_one_when_every_expert_gets_its_share_and_more_otherwise():
    layer, x = _layer(experts_per_token=1), _rows(tokens=64)
    with torch.no_grad():
        layer.router.weight.zero_()
    layer(x)
    assert layer.balance_loss.item() == pytest.approx(1.0)  # one expert, but all scores equal
    with torch.no_grad():
        layer.router.weight[0] = 5 * x.mean((0, 1))
    layer(x.mean((0, 1)).expand_as(x))
    assert layer.balance_loss.item() > 1.0


def test_outputs_do_not_depend_on_the_other_rows():
    layer, x = _layer(capacity_factor=0.5), _rows(rows=3)

    together = layer(x)
    apart = torch.cat([layer(row[None]) for row in x])

    torch.testing.assert_close(together, apart, atol=1e-15, rtol=0)


def test_decoder_with_experts_adds_their_balance_losses():
    model = DecoderLM(DecoderConfig(vocab_size=32, num_layers=2, num_experts=4, hidden_size=16))
    assert auxiliary_loss(model) is None

    model(torch.arange(8)[None])

    losses = [layer.ffn.balance_loss for layer in model.layers]
    assert auxiliary_loss(model).item() == pytest.approx(0.01 * sum(losses).item())
    assert auxiliary_loss(DecoderLM(DecoderConfig(vocab_size=32))) is None


def test_more_choices_than_experts_are_refused():
    with pytest.raises(ValueError, match=r"set 1 <= experts_per_token <= 4"):
        _layer(experts_per_token=5)
