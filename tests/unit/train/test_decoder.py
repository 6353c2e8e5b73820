"""The decoder model: causality, cache, seeds, sizes."""

import pytest
import torch

from nbdist.train.models import DecoderConfig, DecoderLM

CONFIG = DecoderConfig(
    vocab_size=50, num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=32, context_length=24
)


class FakeCache:
    """Keeps all keys and values and attends to them with a plain mask."""

    def __init__(self) -> None:
        self.kept = {}

    def attend(self, layer_index, query, key, value):
        old = self.kept.get(layer_index)
        if old is not None:
            key, value = torch.cat((old[0], key), 2), torch.cat((old[1], value), 2)
        self.kept[layer_index] = (key, value)
        new, seen = query.shape[2], key.shape[2]
        mask = torch.ones(new, seen, dtype=torch.bool).tril(seen - new)
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=True
        )


@pytest.fixture
def model():
    return DecoderLM(CONFIG, seed=3).double()


def test_logits_do_not_depend_on_later_tokens(model):
    tokens = torch.arange(20).reshape(2, 10)
    changed = tokens.clone()
    changed[:, 6:] = 1

    before, after = model(tokens), model(changed)

    assert before.shape == (2, 10, 50)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


def test_cached_decoding_equals_the_whole_row(model):
    tokens = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(0))
    places = torch.arange(12).expand(3, 12)
    cache = FakeCache()
    parts = [model(tokens[:, a:b], places[:, a:b], cache) for a, b in [(0, 5), (5, 6), (6, 12)]]

    # float64; the two paths differ in the order of sums only
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), atol=1e-12, rtol=0)


def test_positions_shift_nothing_but_relative_places(model):
    tokens = torch.randint(0, 50, (1, 8), generator=torch.Generator().manual_seed(1))

    shifted = model(tokens, torch.arange(8)[None] + 9)

    # RoPE is relative; float64 angles leave round-off only
    torch.testing.assert_close(shifted, model(tokens), atol=1e-12, rtol=0)


def test_weights_are_a_function_of_the_seed_also_through_the_meta_device():
    whole = DecoderLM(CONFIG, seed=7)
    with torch.device("meta"):
        late = DecoderLM(CONFIG)
    late.to_empty(device="cpu").reset_parameters(torch.Generator().manual_seed(7))
    other = DecoderLM(CONFIG, seed=8)

    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), late.parameters(), strict=True)
    )
    assert not torch.equal(whole.embedding.weight, other.embedding.weight)


def test_num_parameters_counts_a_tied_head_once():
    tied = DecoderLM(DecoderConfig.tiny(1024))
    untied = DecoderLM(DecoderConfig(vocab_size=1024, tie_embeddings=False))

    assert tied.num_parameters == 869_504
    assert untied.num_parameters == tied.num_parameters + 1024 * 128


def test_forward_refuses_a_row_longer_than_the_context(model):
    with pytest.raises(ValueError, match="context_length=24"):
        model(torch.zeros(1, 25, dtype=torch.long))


def test_forward_refuses_a_cache_without_positions(model):
    with pytest.raises(ValueError, match="pass positions of shape"):
        model(torch.zeros(1, 2, dtype=torch.long), cache=FakeCache())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"vocab_size": 0}, "vocab_size=0 is not above 0"),
        ({"vocab_size": 9, "hidden_size": 36, "num_heads": 8}, "set hidden_size=48"),
        ({"vocab_size": 9, "num_kv_heads": 3}, "num_kv_heads to a divisor of 4"),
    ],
)
def test_config_refuses_sizes_that_do_not_fit(change, text):
    with pytest.raises(ValueError, match=text):
        DecoderConfig(**change)


def test_keep_picks_the_places_whose_logits_are_made(model):
    tokens = torch.arange(6)[None]
    keep = torch.tensor([1, 5])

    # another shape of the last product sums in another order
    torch.testing.assert_close(model(tokens, keep=keep), model(tokens)[:, keep])
