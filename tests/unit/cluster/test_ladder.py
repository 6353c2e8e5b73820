"""How long the ranks of a cell that has to end are left alone; no rank runs here."""

import pytest

from nbdist.cluster.ladder import Ladder

BOTH = frozenset({0, 1})


def due_at(ladder, waiting, since):
    """Seconds after `since` at which the next rung is due, to a tenth; None within a minute."""
    tenths = (t for t in range(1, 600) if ladder.is_due(waiting, since + t / 10 + 0.01))
    return next((t / 10 for t in tenths), None)


@pytest.fixture
def asked():
    """A ladder on which a stop was asked for at 100 s."""
    ladder = Ladder()
    ladder.ask()
    assert ladder.climb(100.0) == 1
    return ladder


def test_cell_that_runs_is_left_alone():
    ladder = Ladder()
    ladder.take_end(5.0, failed=False)
    assert not ladder.is_climbing
    assert due_at(ladder, BOTH, 0.0) is None


def test_failure_interrupts_and_then_frees_the_others_half_a_second_apart():
    ladder = Ladder()
    ladder.take_end(100.0, failed=True)
    assert due_at(ladder, {1}, 100.0) == 0.5
    assert ladder.climb(100.5) == 1
    ladder.take_deferral(1)  # a trainer whose peer has failed waits for nothing that will come
    assert due_at(ladder, {1}, 100.5) == 0.5
    assert ladder.climb(101.0) == 2
    assert due_at(ladder, {1}, 101.0) is None


def test_stop_frees_ranks_that_none_has_left(asked):
    assert due_at(asked, BOTH, 100.0) == 1.2


def test_stop_frees_the_others_soon_after_one_has_ended(asked):
    asked.take_end(100.1, failed=False)
    assert due_at(asked, {1}, 100.1) == 0.5


def test_stop_waits_for_trainers_without_limit_until_one_ends(asked):
    asked.take_deferral(0)
    assert due_at(asked, BOTH, 100.0) == 1.2
    asked.take_deferral(1)
    assert due_at(asked, BOTH, 100.0) is None
    assert not asked.is_deferred(BOTH, 100.4)
    assert asked.is_deferred(BOTH, 100.6)
    asked.take_end(130.0, failed=False)
    assert not asked.is_deferred({1}, 131.0)
    assert due_at(asked, {1}, 130.0) == 1.5


def test_rank_that_fails_while_trainers_stop_frees_the_others_soon(asked):
    asked.take_deferral(0)
    asked.take_deferral(1)
    asked.take_end(101.0, failed=True)
    assert due_at(asked, {1}, 101.0) == 0.5


def test_ranks_that_do_not_end_when_freed_are_given_up(asked):
    assert asked.climb(101.0) == 2
    assert asked.climb(102.0) == 2
    assert not asked.is_hopeless(106.9)
    assert asked.is_hopeless(107.1)


def test_rank_that_formats_its_error_is_left_alone_for_a_while():
    ladder = Ladder()
    ladder.take_failure(1, 10.0)
    assert not ladder.is_due({1}, 11.0)
    assert ladder.is_due({0, 1}, 11.0)
    assert ladder.pressed({0, 1}, 11.0) == {0}
    assert ladder.pressed({0, 1}, 16.0) == {0, 1}
    ladder.ask()
    assert ladder.pressed({0, 1}, 11.0) == {0, 1}
