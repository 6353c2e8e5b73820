"""Sampling: what is kept, what is drawn, what it touches."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from nbdist.messages import Sampling
from nbdist.serve.engine import EngineLimits
from nbdist.serve.request import check_prompt, check_sampling, sampling_of
from nbdist.serve.sampling import Sampler, likeliest

LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))


def draws(number: int, **options) -> Counter:
    sampler = Sampler(Sampling(**{"temperature": 1.0, "seed": 0, **options}))
    return Counter(sampler.choose(LOGITS) for _ in range(number))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dense", [True, False])
def test_likeliest_finds_the_largest_and_what_is_not_finite(dtype, dense):
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(2)).to(dtype)
    logits[1, 7], logits[2, 8], logits[3] = torch.nan, torch.inf, -torch.inf
    logits = logits if dense else logits.t().contiguous().t()

    places, finite = likeliest(logits)
    assert finite == [True, False, False, False, True]
    assert [logits[row, places[row]] for row in (0, 4)] == [logits[row].max() for row in (0, 4)]
    assert likeliest(logits[:0]) == ([], [])


def test_sampler_at_temperature_zero_takes_the_most_likely():
    assert set(draws(5, temperature=0.0)) == {1}


def test_sampler_at_temperature_one_follows_the_probabilities():
    counts = draws(4000)

    for token, probability in enumerate(LOGITS.exp().tolist()):
        # four standard deviations of a binomial count
        spread = 4 * (4000 * probability * (1 - probability)) ** 0.5
        assert abs(counts[token] - 4000 * probability) < spread


def test_sampler_with_top_k_keeps_the_k_most_likely():
    assert set(draws(500, top_k=2)) == {1, 3}


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, {1}), (0.6, {1, 3}), (0.8, {1, 2, 3})])
def test_sampler_with_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    assert set(draws(800, top_p=top_p)) == kept


def test_sampler_at_a_tiny_temperature_stays_finite():
    assert set(draws(20, temperature=1e-300)) == {1}


def test_sampler_with_a_seed_repeats_itself_and_leaves_the_global_generator():
    before = torch.get_rng_state()

    first, second, other = draws(50), draws(50), draws(50, seed=1)
    Sampler(Sampling(seed=None)).choose(LOGITS)

    assert first == second != other
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temperature": -1}, "temperature=-1 is not a finite number"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_p": 0.0}, r"top_p=0.0 is not in the range 0 < top_p <= 1"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -1}, "top_k=-1 is not a whole number of at least 0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is not a whole number of at least 1"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"seed": 2**63}, "is above 9223372036854775807"),
        ({"stop": ("",)}, "non-empty texts"),
    ],
)
def test_check_sampling_of_a_value_out_of_range_names_it(values, text):
    with pytest.raises(ValueError, match=text):
        check_sampling(Sampling(**values))


def test_sampling_of_an_unknown_field_lists_the_fields():
    with pytest.raises(ValueError, match=r"no field \['topp'\]; it has \['max_new_tokens'"):
        sampling_of({"topp": 0.5})


def test_sampling_of_one_stop_text_makes_a_tuple():
    assert sampling_of({"stop": "END"}).stop == ("END",)


@pytest.mark.parametrize(
    ("ids", "text"),
    [([], "0 tokens"), ([1] * 8, "shorten it to at most 7 tokens"), ([99], "token id 99")],
)
def test_check_prompt_that_cannot_run_says_what_to_do(ids, text):
    with pytest.raises(ValueError, match=text):
        check_prompt(
            ids,
            EngineLimits(vocab_size=50, context_length=8, max_batch=1, capacity_tokens=99),
        )
