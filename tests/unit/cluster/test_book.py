"""The study of a search: counts, answers and the table, without ranks."""

import math
import sys

import optuna
import pytest

from nbdist.cluster.search import SearchResult
from nbdist.cluster.search.book import Book, open_study
from nbdist.messages import TrialCall, TrialEnded


def _book(num_trials=3, retries=1, **study):
    given = {"study": None, "direction": "minimize", "sampler": None, "pruner": None} | study
    return Book(open_study(**given), num_trials, retries)


def _call(method, **arguments):
    return TrialCall(rank=0, cell_id="c", seq=0, number=7, method=method, arguments=arguments)


def _ended(value=0.0, *, is_pruned=False):
    return TrialEnded(rank=0, cell_id="c", seq=1, value=value, is_pruned=is_pruned)


def test_as_many_trials_are_begun_as_were_asked_for_and_none_after_a_stop():
    book = _book(num_trials=3)
    assert [book.next("0").number, book.next("1").number] == [0, 1]
    book.close()
    assert book.next("0") is None


def test_answers_are_those_of_optuna_and_its_refusals_are_told():
    book = _book()
    trial = book.next("0-1")
    reply = book.answer(trial, _call("suggest_int", name="x", low=3, high=3))
    assert (reply.cell_id, reply.number, reply.value, reply.error) == ("c", 7, 3, "")
    refused = book.answer(trial, _call("suggest_float", name="y", low=2.0, high=1.0))
    assert "low <= high" in refused.error
    assert refused.value is None
    assert "no 'set_user_attr'" in book.answer(trial, _call("set_user_attr", key="a")).error


def test_parameters_of_a_dead_rank_are_tried_again_as_often_as_allowed():
    book = _book(num_trials=1, retries=2)
    for attempt in (1, 2, 3):
        trial = book.next("0")
        assert book.answer(trial, _call("suggest_float", name="x", low=0, high=1)).error == ""
        assert trial.user_attrs.get("attempt", 1) == attempt
        book.died(trial, "rank 0 died")
    assert book.next("0") is None
    assert book.num_ended == 1
    assert len({trial.params["x"] for trial in book.study.trials}) == 1
    assert [trial.user_attrs.get("retry_of") for trial in book.study.trials] == [None, 0, 1]


def test_parameters_outlive_a_retry_that_dies_before_it_asks_for_them():
    book = _book(num_trials=1, retries=2)
    first = book.next("0")
    value = book.answer(first, _call("suggest_float", name="x", low=0, high=1)).value
    book.died(first, "rank 0 died")
    book.died(book.next("1"), "rank 1 died")
    again = book.answer(book.next("0"), _call("suggest_float", name="x", low=0, high=1))
    assert again.value == value


def test_trial_that_its_ranks_could_not_run_counts_no_attempt():
    book = _book(num_trials=1, retries=0)
    book.put_back(book.next("0"), "rank 1 does not answer")
    assert book.next("2").user_attrs["attempt"] == 1
    assert book.num_ended == 0


def test_endings_become_states_of_the_study():
    book = _book(num_trials=4)
    trials = [book.next("0") for _ in range(4)]
    book.take(trials[0], _ended(2.5))
    book.take(trials[1], _ended(is_pruned=True))
    book.take(trials[2], _ended(math.nan))
    book.stopped(trials[3])
    states = [trial.state.name for trial in book.study.trials]
    assert states == ["COMPLETE", "PRUNED", "FAIL", "FAIL"]
    assert book.study.trials[2].user_attrs["error"] == "the objective returned nan"
    assert book.best() == 2.5
    assert book.num_ended == 3


@pytest.mark.parametrize("dies", [None, 0, 1])
def test_grid_that_has_been_tried_does_not_end_a_search(dies):
    sampler = optuna.samplers.GridSampler({"x": [1, 2]}, seed=0)
    book = _book(num_trials=2, sampler=sampler)
    while (trial := book.next("0")) is not None:
        value = book.answer(trial, _call("suggest_int", name="x", low=1, high=2)).value
        if trial.number == dies:
            book.died(trial, "rank 0 died")
        else:
            book.take(trial, _ended(value))
    complete = [trial for trial in book.study.trials if trial.state.name == "COMPLETE"]
    assert sorted(trial.params["x"] for trial in complete) == [1, 2]
    assert book.num_ended == 2


def test_table_has_the_best_first_and_says_what_went_wrong():
    book = _book(num_trials=3, direction="maximize")
    for value in (1.0, 3.0, None):
        trial = book.next("2-3")
        book.answer(trial, _call("suggest_categorical", name="kind", choices=["a"]))
        if value is None:
            book.fail(trial, "rank 2 raised\nmore")
        else:
            book.take(trial, _ended(value))
    lines = str(SearchResult(book.study)).splitlines()
    assert lines[0] == "3 trials: 2 complete, 1 fail; best 3 (trial 1): kind=a"
    assert [line.split()[:3] for line in lines[2:]] == [
        ["1", "2-3", "complete"],
        ["0", "2-3", "complete"],
        ["2", "2-3", "fail"],
    ]
    assert lines[4].endswith("kind=a; rank 2 raised")
    assert str(SearchResult(_book().study)) == "no trials"


def test_without_optuna_the_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r'needs Optuna.*run: pip install "nbdist\[tune\]"'):
        _book()
