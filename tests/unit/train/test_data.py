"""Batches are arithmetic on (seed, step, rank); tokenizers lose nothing."""

import subprocess
import sys

import pytest
import torch

from nbdist.train.data import TextData, build_tokenizer, shakespeare

TEXT = shakespeare()[:30_000]


@pytest.fixture(scope="module")
def data():
    return TextData(TEXT, vocab_size=300, context_length=16, seed=5)


def _ids(data, step, size, world_size):
    parts = [
        data.for_rank(global_batch_size=size, rank=rank, world_size=world_size).sample_ids(step)
        for rank in range(world_size)
    ]
    return [sample for part in parts for sample in part]


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_global_batch_is_the_same_for_every_world_size(data, world_size):
    for step in (0, 7, 1000):
        assert _ids(data, step, 12, world_size) == _ids(data, step, 12, 1)


def test_rows_are_dealt_within_one_of_each_other_when_uneven(data):
    sizes = [
        len(data.for_rank(global_batch_size=8, rank=rank, world_size=3).sample_ids(4))
        for rank in range(3)
    ]

    assert sum(sizes) == 8
    assert max(sizes) - min(sizes) == 1


def test_epoch_visits_every_training_sample_once_across_batch_borders(data):
    whole = data.for_rank(global_batch_size=7, rank=0, world_size=1)
    seen = [
        sample for step in range(2 * data.num_train // 7 + 1) for sample in whole.sample_ids(step)
    ]

    size = data.num_train
    assert size % 7, "the epoch's end should fall inside a batch"
    assert sorted(seen[:size]) == list(range(size))
    assert sorted(seen[size : 2 * size]) == list(range(size))
    assert seen[:size] != seen[size : 2 * size]


def test_order_is_equal_by_seed_and_differs_between_seeds():
    again = TextData(TEXT, vocab_size=300, context_length=16, seed=5)
    other = TextData(TEXT, vocab_size=300, context_length=16, seed=6)
    first = TextData(TEXT, vocab_size=300, context_length=16, seed=5)

    assert _ids(first, 3, 8, 1) == _ids(again, 3, 8, 1)
    assert _ids(first, 3, 8, 1) != _ids(other, 3, 8, 1)


def test_targets_are_the_inputs_one_token_ahead(data):
    inputs, targets = data.for_rank(global_batch_size=4, rank=0, world_size=1).batch(2)

    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_samples_put_together_are_the_text(data):
    ids = data.windows[:, :-1].reshape(-1).tolist()

    assert TEXT.startswith(data.tokenizer.decode(ids[:400]))


def test_validation_windows_are_apart_from_training_and_seen_once(data):
    ranks = [data.for_rank(global_batch_size=4, rank=rank, world_size=2) for rank in range(2)]
    count = ranks[0].num_validation_batches
    rows = [
        tuple(row.tolist())
        for index in range(count)
        for rank in ranks
        for row in rank.validation_batch(index)[0]
    ]
    held_out = [tuple(row.tolist()) for row in data.windows[data.num_train :, :-1]]

    assert rows == held_out[: count * 4]
    assert len(held_out) == data.num_validation == round(len(data.windows) * 0.1)


def test_validation_split_smaller_than_a_batch_gives_one_short_batch():
    few = TextData(TEXT[:6000], vocab_size=300, context_length=64, validation_fraction=0.1)
    ranks = [few.for_rank(global_batch_size=32, rank=rank, world_size=2) for rank in range(2)]

    sizes = [len(rank.validation_batch(0)[0]) for rank in ranks]
    assert ranks[0].num_validation_batches == 1
    assert sum(sizes) == few.num_validation < 32


def test_for_rank_refuses_a_rank_without_a_row(data):
    with pytest.raises(ValueError, match="set global_batch_size >= 4"):
        data.for_rank(global_batch_size=3, rank=0, world_size=4)


def test_for_rank_refuses_a_validation_split_below_the_world_size():
    few = TextData(TEXT[:2500], vocab_size=300, context_length=64, validation_fraction=0.1)

    with pytest.raises(ValueError, match="set validation_fraction=0"):
        few.for_rank(global_batch_size=8, rank=0, world_size=8)


def test_text_data_refuses_a_short_text():
    with pytest.raises(ValueError, match="too few for a training window"):
        TextData("to be", context_length=128)


def test_text_data_refuses_options_out_of_range():
    with pytest.raises(ValueError, match="context_length >= 1"):
        TextData(TEXT, context_length=0)


@pytest.mark.parametrize("text", ["Zażółć 👋🏽 日本\n\n  \t end", "", "a\x00b\r\n", TEXT])
def test_tokenizer_round_trip_is_lossless(data, text):
    assert data.tokenizer.decode(data.tokenizer.encode(text).ids) == text


def test_tokenizer_is_equal_in_another_process(data):
    code = (
        "from nbdist.train.data import *; import sys;"
        "sys.stdout.write(build_tokenizer(shakespeare()[:30_000], 300).to_str())"
    )
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert other.stdout == data.tokenizer.to_str()


def test_tokenizer_refuses_fewer_ids_than_bytes():
    with pytest.raises(ValueError, match="256 bytes"):
        build_tokenizer(TEXT, 255)


def test_shakespeare_is_three_whole_plays_of_named_speeches():
    text = shakespeare()

    assert text.isascii()
    assert 250_000 < len(text) < 350_000
    assert text.startswith("A Midsummer Night's Dream\n\nACT I\n")
    assert "\nPROSPERO: " in text
    assert "\nMACBETH: " in text
    assert not set("*_#") & set(text)
