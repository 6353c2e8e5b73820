"""Equal lines come out once, in each rank's own order."""

import pytest

from nbdist.notebook.fold import HOLD_SECONDS, Folder, Piece, span
from nbdist.testing import ManualClock


class Shown(list):
    def __call__(self, ranks, piece):
        self.append((span(ranks), piece.text))


def line(text, stream="stdout"):
    return Piece(stream, text)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((0,), "0"),
        ((1, 0), "0-1"),
        ((0, 1, 2, 3), "0-3"),
        ((0, 2), "0,2"),
        ((0, 1, 3, 5, 6), "0-1,3,5-6"),
    ],
)
def test_span_shortens_runs(ranks, text):
    assert span(ranks) == text


def test_folder_shows_equal_lines_once_as_soon_as_all_brought_them():
    shown = Shown()
    folder = Folder([0, 1], shown, ManualClock())
    folder.add(0, line("hello"))
    folder.release()
    assert shown == []

    folder.add(1, line("hello"))
    folder.release()

    assert shown == [("0-1", "hello")]


def test_folder_shows_different_lines_by_rank():
    shown = Shown()
    folder = Folder([0, 1], shown, ManualClock())
    for rank in (1, 0):
        folder.add(rank, line("same"))
        folder.add(rank, line(f"rank {rank}"))
        folder.add(rank, line("end"))
        folder.end(rank)
    folder.release()
    assert shown == [("0-1", "same"), ("0", "rank 0"), ("1", "rank 1"), ("0-1", "end")]


def test_folder_waits_for_a_line_that_comes_after_a_different_one():
    shown = Shown()
    folder = Folder([0, 1], shown, ManualClock())
    for piece in (line("rank 0"), line("end")):
        folder.add(0, piece)
    folder.end(0)
    folder.add(1, line("rank 1"))
    folder.release()
    folder.add(1, line("end"))
    folder.end(1)
    folder.release()
    assert shown == [("0", "rank 0"), ("1", "rank 1"), ("0-1", "end")]


def test_folder_lets_a_rank_catch_up_to_an_equal_line():
    shown = Shown()
    folder = Folder([0, 1], shown, ManualClock())
    for text in ("only 0", "both"):
        folder.add(0, line(text))
    folder.add(1, line("both"))
    folder.end(1)
    folder.release()
    assert shown == [("0", "only 0"), ("0-1", "both")]


def test_folder_waits_no_longer_than_the_hold_for_a_silent_rank():
    shown, clock = Shown(), ManualClock()
    folder = Folder([0, 1], shown, clock)
    folder.add(0, line("early"))
    clock.advance(HOLD_SECONDS + 0.01)
    folder.release()
    assert shown == [("0", "early")]


def test_folder_does_not_wait_for_a_rank_that_has_ended():
    shown = Shown()
    folder = Folder([0, 1], shown, ManualClock())
    folder.end(1)
    folder.add(0, line("alone"))
    folder.release()
    assert shown == [("0", "alone")]


def test_folder_keeps_each_ranks_order_when_lines_cross():
    shown = Shown()
    folder = Folder([0, 1], shown, ManualClock())
    for rank, texts in ((0, "ab"), (1, "ba")):
        for text in texts:
            folder.add(rank, line(text))
        folder.end(rank)
    folder.release(everything=True)

    for rank, texts in (("0", "ab"), ("1", "ba")):
        seen = [t for ranks, t in shown if ranks in (rank, "0-1")]
        assert seen == list(texts)


def test_folder_tells_stdout_from_stderr():
    shown = Shown()
    folder = Folder([0, 1], shown, ManualClock())
    folder.add(0, line("x", "stdout"))
    folder.add(1, line("x", "stderr"))
    folder.release(everything=True)
    assert sorted(shown) == [("0", "x"), ("1", "x")]
