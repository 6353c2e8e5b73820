"""Progress bars are known by their text, and drawn text is read as a terminal reads it."""

import io

import pytest
from tqdm import tqdm

from nbdist.notebook.bars import merge, parse
from nbdist.notebook.board import OPEN_SECONDS, Board
from nbdist.notebook.screen import Screen
from nbdist.testing import ManualClock


def drawn(draw):
    """Return what tqdm writes for `draw(make_bar)`, every state of it."""
    target = io.StringIO()
    draw(lambda *args, **kwargs: tqdm(*args, file=target, ncols=60, mininterval=0, **kwargs))
    return target.getvalue()


@pytest.mark.parametrize(
    ("row", "name", "done", "is_complete"),
    [
        (" 45%|####5     | 45/100 [00:02<00:02, 22.1it/s]", "|100|", 45, False),
        ("a: b: 100%|##| 2/2 [00:00<00:00, 1428.09it/s, loss=1]", "a: b|2|", 2, True),
        ("dl:  45%|#| 4.50k/10.0k [00:02<00:02, 22.1kB/s]", "dl|10.0k|", 4500, False),
        ("1.5kit [00:01, 11.9it/s]", "|?|it", 1500, False),
        ("x: 3.4MB [00:01, ?B/s]", "x|?|B", 3_400_000, False),
        ("\x1b[35mfit\x1b[0m \x1b[1m━━━━━╸━━━━━━━━━━\x1b[0m  37% 0:00:03", "fit|%|rich", 37, False),
    ],
)
def test_bar_is_known_by_its_text(row, name, done, is_complete):
    bar = parse(row)
    assert (bar.name, bar.done, bar.is_complete, bar.rest) == (name, done, is_complete, "")


@pytest.mark.parametrize("row", ["loss [3, 4]", "1/3 [x]", "50% | done", "a ━ b", "[00:02]", ""])
def test_other_text_is_no_bar(row):
    assert parse(row) is None


def test_slowest_is_named_when_it_is_behind_by_more_than_half_a_second():
    row = "{0}%|#| {0}/100 [00:02<00:02, 20.0it/s]"
    states = {rank: parse(row.format(done)) for rank, done in enumerate((45, 31, 44))}
    assert merge(states, going=[0, 1, 2]).endswith("20.0it/s]  slowest: rank 1 at 31")
    states[1] = parse(row.format(36))
    assert merge(states, going=[0, 1, 2]) == row.format(45)


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("leave", [True, False])
def test_nested_bars_leave_what_a_terminal_shows(size, leave):
    def draw(make_bar):
        for _ in make_bar(range(2), desc="outer"):
            for _ in make_bar(range(2), desc="inner", leave=leave):
                pass

    screen, text, rows = Screen(), drawn(draw), []
    for start in range(0, len(text), size):
        rows += screen.feed(text[start : start + size])
    rows += screen.end()
    names = [row.split(":")[0] for row in rows]
    assert names == (["inner", "inner", "outer"] if leave else ["outer"])
    assert all("2/2" in row and "\x1b" not in row for row in rows)


def test_bars_at_fixed_positions_stay_in_their_rows():
    def draw(make_bar):
        bars = [make_bar(total=2, desc=desc, position=at) for at, desc in enumerate("ab")]
        for bar in bars * 2:
            bar.update()
        for bar in bars:
            bar.close()

    screen = Screen()
    rows = screen.feed(drawn(draw)) + screen.end()
    assert [row.split(":")[0] for row in rows] == ["a", "b"]


def test_rows_are_what_was_written_last_in_them():
    screen = Screen()
    assert screen.feed("one\ntw") == ["one"]
    assert screen.feed("o\n 9%\r10%\r") == ["two"]
    assert screen.line == "10%"
    assert screen.feed("\n\x1b[1mbold\x1b[0m\n") == ["10%", "\x1b[1mbold\x1b[0m"]
    assert screen.feed("wiped\r\x1b[2K\rkept\x1b[") == []
    assert screen.feed("0m\n\nlast") == ["kept\x1b[0m", ""]
    assert screen.end() == ["last"]


def make_board(num_ranks=2):
    clock = ManualClock()
    return Board(range(num_ranks), clock), clock


def state(done):
    return parse(f"{done}%|#| {done}/100 [00:02<00:02, 1.0it/s]")


def test_bar_that_ended_on_one_rank_stays_one_line_until_all_have_ended():
    board, clock = make_board()
    for rank in (0, 1):
        board.draw(rank, "stderr", [state(10)])
    assert board.lines() == []
    clock.advance(OPEN_SECONDS)
    key = board.end_bar(0, "stderr", state(100))
    ((ranks, line),) = board.lines()
    assert ranks == (0, 1)
    assert line.endswith("slowest: rank 1 at 10")
    assert board.take_ended(key, [0]) is None, "it stands in place already"
    assert board.is_going
    board.end_bar(1, "stderr", state(100))
    assert board.lines() == [((0, 1), state(100).line)]
    assert not board.is_going


def test_next_bar_of_the_same_name_is_another_bar():
    board, clock = make_board()
    board.end_bar(0, "stderr", state(100))
    board.draw(0, "stderr", [state(20)])
    board.draw(1, "stderr", [state(90)])
    clock.advance(OPEN_SECONDS)
    assert [ranks for ranks, _ in board.lines()] == [(0, 1), (0,)]


def test_wiped_bar_is_forgotten_and_a_repeated_one_names_nobody():
    board, clock = make_board()
    for rank in (0, 1):
        board.draw(rank, "stderr", [state(90)])
    board.draw(0, "stderr", [])
    board.draw(0, "stderr", [state(5)])
    clock.advance(OPEN_SECONDS)
    ((_, line),) = board.lines()
    assert line == state(90).line
    for rank in (0, 1):
        board.draw(rank, "stderr", [])
    assert board.lines() == []


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_rich_progress_leaves_what_a_terminal_shows(size):
    progress = pytest.importorskip("rich.progress")
    console = pytest.importorskip("rich.console")
    target = io.StringIO()
    terminal = console.Console(file=target, force_terminal=True, width=80)
    with progress.Progress(console=terminal, auto_refresh=False) as bars:
        tasks = [bars.add_task(name, total=4) for name in ("one", "two")]
        for step in range(4):
            for task in tasks:
                bars.advance(task)
            bars.refresh()
            terminal.print(f"step {step}")
    screen, rows, text = Screen(), [], target.getvalue()
    for start in range(0, len(text), size):
        rows += screen.feed(text[start : start + size])
        rows += screen.settle()
    assert [row for row in rows if "step" in row] == rows[:4]
    rows += screen.end()
    assert [parse(row).name for row in rows[4:]] == ["one|%|rich", "two|%|rich"]
    assert all(parse(row).is_complete for row in rows[4:])
