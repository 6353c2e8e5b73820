"""Rank lists and sources are checked before any rank is touched."""

import pytest

from nbdist.cluster.source import check_ranks, check_source, parse_ranks


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", (0,)),
        ("0,2:4", (0, 2, 3)),
        (":", (0, 1, 2, 3)),
        ("::2", (0, 2)),
        ("-1", (-1,)),
        (" 1 , 3 ", (1, 3)),
    ],
)
def test_parse_ranks_reads_numbers_and_slices(text, ranks):
    assert parse_ranks(text, 4) == ranks


@pytest.mark.parametrize("text", ["", "a", "1;2", "1:2:3:4", "0::0", "__import__('os')", "1.5"])
def test_parse_ranks_refuses_what_is_no_rank(text):
    with pytest.raises(ValueError, match="write numbers and slices such as `0,2:4`"):
        parse_ranks(text, 4)


def test_check_ranks_sorts_and_drops_repetition():
    assert check_ranks("3,0,-1", 4) == (0, 3)
    assert check_ranks([2, 1, 2], 4) == (1, 2)
    assert check_ranks(None, 3) == (0, 1, 2)


@pytest.mark.parametrize(
    ("ranks", "found"), [("5", "rank 5 is not in it"), ([-3], "rank -3"), ("2:2", "no rank")]
)
def test_check_ranks_outside_the_world_names_the_rank(ranks, found):
    with pytest.raises(ValueError, match=f"ranks 0 to 1: .*{found}"):
        check_ranks(ranks, 2)


@pytest.mark.parametrize(
    "source", ["x = 1", "await f()", "%time x", "!ls", "# only a comment", "", "x?", "%%time\na=1"]
)
def test_check_source_takes_what_ipython_runs(source):
    check_source(source)


def test_check_source_with_syntax_error_raises_it():
    with pytest.raises(SyntaxError, match="invalid syntax"):
        check_source("x = = 2")
