"""What of a cell's text leaves the rank."""

from nbdist.rank.budget import CHARS_PER_SECOND, TAIL_CHARS, TextBudget
from nbdist.testing import ManualClock


def make_budget(limit):
    sent, clock = [], ManualClock()
    budget = TextBudget(lambda *piece: sent.append(piece), clock)
    budget.reset(limit)
    return budget, sent, clock


def test_text_within_the_limit_goes_at_once():
    budget, sent, _ = make_budget(100_000)
    budget.add("stdout", "x" * 50_000)
    budget.add("stderr", "y")
    assert sent == [("stdout", "x" * 50_000, 0), ("stderr", "y", 0)]


def test_last_lines_of_what_is_beyond_go_at_the_end_with_what_is_left_out():
    budget, sent, _ = make_budget(TAIL_CHARS)
    lines = "".join(f"line {i:05}\n" for i in range(2000))
    budget.add("stdout", lines[: TAIL_CHARS // 8])
    budget.add("stdout", lines[TAIL_CHARS // 8 :])
    assert len(sent) == 1
    budget.release()
    (_, first, _), (_, last, left_out) = sent
    assert lines.endswith(last)
    assert len(first) + left_out + len(last) == len(lines)
    assert last.startswith("line ")
    assert len(last) <= TAIL_CHARS


def test_text_flows_again_as_time_passes():
    budget, sent, clock = make_budget(TAIL_CHARS)
    budget.add("stdout", "x" * TAIL_CHARS)
    budget.add("stdout", "held\n")
    assert budget.holds_text
    clock.advance(TAIL_CHARS / CHARS_PER_SECOND + 1)
    budget.try_release()
    assert sent[1:] == [("stdout", "held\n", 0)]
    assert not budget.holds_text
