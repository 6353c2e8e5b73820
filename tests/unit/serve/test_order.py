"""What a `ServeOrder` refuses before any rank is touched, and the cell it becomes."""

from __future__ import annotations

import typing

import pytest

from nbdist.serve.engines import EngineName
from nbdist.serve.order import ENGINES, ServeOrder


@pytest.fixture
def directory(tmp_path):
    for name, text in (("config.json", "{}"), ("tokenizer.json", ""), ("model.safetensors", "")):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_order_of_a_directory_becomes_a_cell_with_its_absolute_path(directory, monkeypatch):
    monkeypatch.chdir(directory.parent)

    order = ServeOrder(what=directory.name, weight_bits=8).checked(3)

    assert (order.what, order.replicas) == (str(directory), 3)
    source = order.cell()
    compile(source, "cell", "eval")
    assert f"what={str(directory)!r}" in source
    assert "weight_bits=8" in source


def test_order_of_names_needs_no_directory():
    order = ServeOrder(what="model", tokenizer="tokenizer", replicas=1).checked(2)

    assert not order.is_directory
    assert order.what == "model"


def test_order_knows_all_engines():
    assert typing.get_args(EngineName) == ENGINES


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"replicas": 3}, r"3 replicas were asked for.* has 2 ranks; ask for 1 to 2"),
        ({"replicas": 0}, r"0 replicas were asked for"),
        ({"replicas": 2, "tp": 2}, r"2 replicas were asked for, of 2 ranks each.*ask for 1 to 1"),
        ({"tp": 3}, r"tp=3 was asked for, and .* do not cover a world of 2; set it to a divisor"),
        ({"tp": 2, "weight_bits": 8}, r"weight_bits=8, .*served by 'native' alone"),
        ({"share": True}, r"share was asked for, .*give its name and its tokenizer's"),
        ({"engine": "fast"}, r"engine='fast' is unknown; choose one of \['auto', 'native'"),
        ({"weight_bits": 3}, r"weight_bits=3 was asked for; weights are kept in 8 or 4 bits"),
        ({"speculation": "draft"}, r"speculation='draft' was asked for; 'ngram' is there"),
        ({"what": "no-such"}, r"given 'no-such', and there is no such directory; .*--tokenizer"),
        ({"what": "a model", "tokenizer": "t"}, r"'a model' is no name that a rank can have"),
    ],
)
def test_order_that_cannot_be_carried_out_says_what_to_do(directory, more, text):
    with pytest.raises(ValueError, match=text):
        ServeOrder(**{"what": str(directory), **more}).checked(2)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_order_of_a_directory_without_a_file_names_it(directory, missing):
    (directory / missing).unlink()
    pattern = missing.replace("model", r"\*").replace(".", r"\.")

    with pytest.raises(ValueError, match=f"has no {pattern}; save model and tokenizer there"):
        ServeOrder(what=str(directory)).checked(2)


def test_order_of_a_directory_with_an_unreadable_config_says_so(directory):
    (directory / "config.json").write_text("{")

    with pytest.raises(ValueError, match=r"config\.json cannot be read: .*save the model again"):
        ServeOrder(what=str(directory)).checked(2)
