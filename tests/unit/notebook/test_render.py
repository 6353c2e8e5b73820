"""What a cell shows: labels, progress bars, displays, quiet cells."""

import pytest

from nbdist.messages import CellNote, RankDisplay, RankDone, RankStream
from nbdist.notebook import render
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


def test_view_bounds_what_it_shows_and_names_the_log(view, capsys, monkeypatch):
    monkeypatch.setattr(render, "MAX_CHARS", 100)
    view.take(text(0, "x" * 60 + "\n" + "y" * 60 + "\n" + "z\n"))
    finish(view)
    out = capsys.readouterr().out
    assert "y" not in out
    assert "z" not in out
    assert out.endswith("`%distributed logs -r 0`\n")


def test_note_is_shown_in_one_place_each_instead_of_the_one_before(view, published, capsys):
    view.take(text(0, "half"))
    for words in ("first", "second"):
        view.take(CellNote(cell_id="c", text=words))
    finish(view)
    shown = [(action, content["data"], label) for action, content, label in published]
    assert shown == [
        ("display_data", {"text/plain": "first"}, ""),
        ("update_display_data", {"text/plain": "second"}, ""),
    ]
    assert len({content["transient"]["display_id"] for _, content, _ in published}) == 1
    assert capsys.readouterr().out == "[0] half\n"
