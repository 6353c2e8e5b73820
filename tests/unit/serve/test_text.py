"""Incremental text: joined pieces are the full decode, stop texts never show."""

from __future__ import annotations

import random

import pytest

from nbdist.serve.text import StopFilter, TextStream


def pieces_of(stream: TextStream, ids: list[int]) -> list[str]:
    shown = []
    for token in ids:
        piece, stopped = stream.push(token)
        shown.append(piece)
        if stopped:
            return shown
    return [*shown, stream.flush()]


@pytest.mark.parametrize(
    "text", ["Zażółć gęślą", "👋🏽 hi 日本語", "a\n\n b", "e\u0301 \U0001f469\u200d\U0001f680"]
)
def test_text_stream_of_multibyte_text_joins_to_the_text(tokenizer, text):
    stream = TextStream(tokenizer)

    pieces = pieces_of(stream, tokenizer.encode(text).ids)

    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_text_stream_of_random_tokens_joins_to_the_full_decode(tokenizer):
    rng = random.Random(0)
    for _ in range(300):
        prompt = tokenizer.encode("the Zażółć").ids
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(1, 40))]

        joined = "".join(pieces_of(TextStream(tokenizer, prompt), ids))

        assert tokenizer.decode(prompt) + joined == tokenizer.decode(prompt + ids)


def test_text_stream_cut_inside_a_character_flushes_what_decode_gives(tokenizer):
    ids = tokenizer.encode("x\U0001f680").ids[:-1]

    joined = "".join(pieces_of(TextStream(tokenizer), ids))

    assert joined == tokenizer.decode(ids)
    assert joined.endswith("\ufffd")


def test_text_stream_with_stop_text_shows_nothing_of_it(tokenizer):
    ids = tokenizer.encode("the fox jumps over. the dog").ids
    stream = TextStream(tokenizer, stop=("over. t",))

    pieces = pieces_of(stream, ids)

    assert "".join(pieces) == "the fox jumps "
    assert stream.flush() == ""


def test_stop_filter_fed_letter_by_letter_never_shows_a_start_of_stop():
    shown = []
    filtered = StopFilter(("END", "ENDING!"))
    for letter in "aENbENDc":
        text, stopped = filtered.push(letter)
        shown.append(text)
        if stopped:
            break

    assert shown == ["a", "", "", "ENb", "", "", ""]


def test_stop_filter_without_a_stop_gives_back_what_it_held():
    filtered = StopFilter(("END",))

    text, stopped = filtered.push("the EN")

    assert (text, stopped, filtered.flush()) == ("the ", False, "EN")


def test_stop_filter_with_two_stops_cuts_at_the_first_in_the_text():
    assert StopFilter(("z", "b")).push("abcz") == ("a", True)
