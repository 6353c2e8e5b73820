"""What a cell shows: labels, progress bars, displays, quiet cells."""

import time

import pytest

from nbdist.messages import CellNote, RankDisplay, RankDone, RanksChanged, RankStream
from nbdist.notebook import board, outlet, render
from nbdist.notebook.render import CellView


def text(rank, content, stream="stdout"):
    return RankStream(rank=rank, cell_id="c", seq=0, stream=stream, text=content)


def done(rank):
    return RankDone(rank=rank, cell_id="c", seq=9, status="ok", seconds=0.1)


@pytest.fixture
def published():
    return []


@pytest.fixture
def view(published):
    return CellView((0, 1), lambda *shown: published.append(shown))


def finish(view, *, failed=False):
    for rank in (0, 1):
        view.take(done(rank))
    view.finish(failed=failed)


def test_view_labels_lines_with_their_ranks(view, capsys):
    for rank in (0, 1):
        view.take(text(rank, f"same\nrank {rank}\n"))
    finish(view)
    assert capsys.readouterr().out == "[0-1] same\n[0] rank 0\n[1] rank 1\n"


def test_view_goes_on_with_other_ranks(view, capsys):
    for piece in ("same\n", "held back"):
        view.take(text(0, piece))
    view.take(text(1, "same\n"))
    view.take(RanksChanged(cell_id="c", ranks=(0, 1, 2)))
    for rank in (0, 1, 2):
        view.take(text(rank, "three\n"))
        view.take(done(rank))
    view.finish(failed=False)
    assert capsys.readouterr().out == "[0-1] same\n[0] held back\n[0-2] three\n"


def test_view_keeps_blank_lines_and_lines_cut_into_pieces(view, capsys):
    for piece in ("he", "llo\n", "\n", "last"):
        view.take(text(0, piece))
    finish(view)
    assert capsys.readouterr().out == "[0] hello\n[0] \n[0] last\n"


def test_view_shows_the_last_state_of_a_progress_bar(view, capsys):
    for percent in range(0, 101, 10):
        view.take(text(0, f"\r{percent}%", "stderr"))
    view.take(text(0, "\n", "stderr"))
    finish(view)
    assert capsys.readouterr().err == "[0] 100%\n"


def test_view_rewrites_an_unfinished_line_in_place(view, capsys, monkeypatch):
    monkeypatch.setattr(render, "PARTIAL_SECONDS", 0.0)
    view.take(text(0, "\r 10% of it", "stderr"))
    view.take(None)
    view.take(text(0, "\r 20%", "stderr"))
    view.take(None)
    view.take(text(0, "\r 30%\n", "stderr"))
    finish(view)
    states = [f"[0]  {state}".ljust(len("[0]  10% of it")) for state in ("10% of it", "20%", "30%")]
    assert capsys.readouterr().err == "\r".join(states) + "\n"


def test_view_shows_a_plain_value_as_text(view, capsys):
    content = {"data": {"text/plain": "tensor(1.)"}, "metadata": {}, "execution_count": 3}
    for rank in (0, 1):
        view.take(
            RankDisplay(rank=rank, cell_id="c", seq=0, action="execute_result", content=content)
        )
    finish(view)
    assert capsys.readouterr().out == "[0-1] tensor(1.)\n"


def test_view_publishes_equal_displays_once_under_their_span(view, published):
    content = {"data": {"text/html": "<b>x</b>"}, "metadata": {}, "transient": {}}
    for rank in (0, 1):
        view.take(
            RankDisplay(rank=rank, cell_id="c", seq=0, action="display_data", content=content)
        )
    finish(view)
    assert [(action, label) for action, _, label in published] == [("display_data", "[0-1]")]
    assert published[0][1]["data"] == {"text/html": "<b>x</b>"}


def test_view_gives_each_rank_a_display_id_of_its_own(view, published):
    for rank in (0, 1):
        content = {"data": {"text/plain": "a"}, "transient": {"display_id": "d"}}
        view.take(
            RankDisplay(rank=rank, cell_id="c", seq=0, action="display_data", content=content)
        )
    finish(view)
    assert [c["transient"]["display_id"] for _, c, _ in published] == ["0-d", "1-d"]


@pytest.mark.parametrize(("failed", "expected"), [(False, ""), (True, "[0] x\n")])
def test_quiet_view_shows_text_only_when_the_cell_fails(failed, expected, published, capsys):
    view = CellView((0, 1), lambda *shown: published.append(shown), quiet=True)
    view.take(text(0, "x\n"))
    finish(view, failed=failed)
    assert capsys.readouterr().out == expected


def test_view_bounds_each_rank_and_shows_its_last_lines(published, capsys, monkeypatch):
    monkeypatch.setattr(outlet, "MAX_CHARS", 100)
    view = CellView((0, 1), lambda *shown: published.append(shown))
    view.take(text(0, "x" * 60 + "\n" + "y" * 60 + "\nlast\n"))
    view.take(text(1, "the other rank has its own room\n"))
    finish(view)
    out = capsys.readouterr().out
    assert sorted(out.splitlines()) == [f"[0] {'x' * 60}", "[1] the other rank has its own room"]
    tail = published[-1][1]["data"]["text/plain"]
    assert "66 characters are not shown, `%distributed logs -r 0` has them" in tail
    assert tail.splitlines()[1:] == [f"[0] {'y' * 60}", "[0] last"]


def test_view_counts_what_a_rank_left_out_and_does_not_join_around_it(view, published, capsys):
    view.take(text(0, "half a"))
    view.take(RankStream(rank=0, cell_id="c", seq=1, stream="stdout", text="end\n", left_out=900))
    finish(view)
    assert capsys.readouterr().out == "[0] half a\n[0] end\n"
    assert "900 characters are not shown" in published[-1][1]["data"]["text/plain"]


def bar(done, total=100, seconds=10, rate=1.0):
    return (
        f"\r{100 * done // total:3}%|###       | {done}/{total} "
        f"[00:{seconds:02}<00:09, {rate:5.2f}it/s]"
    )


def shown_in_place(published):
    """Return what each place of a display has shown, in order."""
    places = {}
    for _, content, _ in published:
        place = places.setdefault(content["transient"]["display_id"], [])
        place.append(content["data"]["text/plain"])
    return list(places.values())


def test_bars_of_all_ranks_are_one_line_in_place_with_the_slowest_named(
    published, capsys, monkeypatch
):
    monkeypatch.setattr(board, "OPEN_SECONDS", 0.0)
    monkeypatch.setattr(render, "PARTIAL_SECONDS", 0.0)
    view = CellView((0, 1), lambda *shown: published.append(shown))
    for rank, done in ((0, 45), (1, 31)):
        view.take(text(rank, bar(done), "stderr"))
    view.take(None)
    for rank, seconds in ((0, 20), (1, 30)):
        view.take(text(rank, bar(100, seconds=seconds) + "\n", "stderr"))
    finish(view)
    (states,) = shown_in_place(published)
    assert states[-1] == f"[0-1] {bar(100, seconds=30)[1:]}"
    assert f"[0-1] {bar(45)[1:]}  slowest: rank 1 at 31" in states
    assert capsys.readouterr().err == ""


def test_bars_with_different_totals_stay_apart(view, published, monkeypatch):
    monkeypatch.setattr(board, "OPEN_SECONDS", 0.0)
    view.take(text(0, bar(10, total=100), "stderr"))
    view.take(text(1, bar(10, total=200), "stderr"))
    finish(view)
    assert [line[:3] for line in shown_in_place(published)[-1][-1].splitlines()] == ["[0]", "[1]"]


def test_short_bar_is_one_line_of_text_the_slowest_one(view, published, capsys):
    for rank in (0, 1):
        view.take(text(rank, bar(50) + bar(100, seconds=3 + rank) + "\n", "stderr"))
    finish(view)
    assert capsys.readouterr().err == f"[0-1] {bar(100, seconds=4)[1:]}\n"
    assert published == []


def test_bar_in_a_terminal_is_rewritten_in_its_line(published, capsys, monkeypatch):
    monkeypatch.setattr(board, "OPEN_SECONDS", 0.0)
    view = CellView((0, 1), lambda *shown: published.append(shown), live=False)
    for done in (10, 20):
        view.take(text(0, bar(done), "stderr"))
    view.take(text(0, bar(100) + "\n", "stderr"))
    finish(view)
    assert published == []
    states = capsys.readouterr().err.rstrip("\n").split("\r")
    assert states[-1].rstrip() == f"[0] {bar(100)[1:]}"


def test_warning_written_beside_a_bar_is_a_line_of_its_own(view, capsys):
    view.take(text(0, bar(45) + "WARNING: hot\n" + bar(100) + "\n", "stderr"))
    finish(view)
    assert capsys.readouterr().err == f"[0] WARNING: hot\n[0] {bar(100)[1:]}\n"


@pytest.mark.parametrize(("silent", "expected"), [("0", []), ("0.001", ["running 3 s"])])
def test_status_is_shown_for_a_silent_cell_unless_switched_off(
    published, silent, expected, monkeypatch
):
    monkeypatch.setenv("NBDIST_STATUS_SECONDS", silent)
    view = CellView((0, 1), lambda *shown: published.append(shown))
    time.sleep(0.002)
    view.take(CellNote(cell_id="c", text="running 3 s", is_status=True))
    finish(view)
    ends = ["ranks 0-1: 0.1 s"] if expected else []
    assert shown_in_place(published) == ([expected + ends] if expected else [])


def test_status_is_not_shown_beside_output(view, published, capsys):
    view.take(text(0, "x\n"))
    view.take(CellNote(cell_id="c", text="running 3 s", is_status=True))
    finish(view)
    assert published == []


def test_note_is_shown_in_one_place_each_instead_of_the_one_before(view, published, capsys):
    view.take(text(0, "half"))
    for words in ("first", "second"):
        view.take(CellNote(cell_id="c", text=words))
    finish(view)
    shown = [(action, content["data"], label) for action, content, label in published]
    assert shown == [
        ("display_data", {"text/plain": "first"}, ""),
        ("update_display_data", {"text/plain": "second"}, ""),
        ("update_display_data", {"text/plain": "ranks 0-1: 0.1 s"}, ""),
    ]
    assert len({content["transient"]["display_id"] for _, content, _ in published}) == 1
    assert capsys.readouterr().out == "[0] half\n"
