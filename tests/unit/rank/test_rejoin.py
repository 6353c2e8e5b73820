"""What a new rank runs of a cell that the others are in the middle of."""

from __future__ import annotations

import ast
import sys

import pytest

from nbdist.rank.rejoin import call_site, joined_at, pause_site, resumed_at


def rest(source, call_text="trainer.fit()"):
    """Return the rest of a cell as text, for the call written so in it."""
    tree = ast.parse(source)
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n) == call_text]
    node = found[0]
    call = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
    left = joined_at(tree, call)
    return left if left is None else ast.unparse(left).replace("__import__", "").splitlines()


BEGIN = "('nbdist.rank.survive', fromlist=['begin']).begin()"
GO_ON = "('nbdist.rank.survive', fromlist=['go_on']).go_on()"


@pytest.mark.parametrize(
    ("source", "left"),
    [
        ("a = 1\ntrainer.fit()\nb = 2", [GO_ON, "b = 2"]),
        ("history = trainer.fit()\nhistory.plot()", [f"history = {GO_ON}", "history.plot()"]),
        ("print('é', trainer.fit())", [f"print('é', {GO_ON})"]),
        (
            "with a:\n    b()\n    trainer.fit()\n    c()\nd()",
            ["with a:", f"    {GO_ON}", "    c()", "d()"],
        ),
        ("if a:\n    trainer.fit()\nelse:\n    b()\nc()", [GO_ON, "c()"]),
        ("if a:\n    b()\nelse:\n    trainer.fit()", [GO_ON]),
        (
            "try:\n    a()\n    trainer.fit()\nfinally:\n    b()",
            ["try:", f"    {GO_ON}", "finally:", "    b()"],
        ),
    ],
)
def test_a_new_rank_runs_the_call_and_what_follows(source, left):
    assert rest(source) == [BEGIN, *left]


@pytest.mark.parametrize(
    "source",
    [
        "for lr in (1, 2):\n    trainer.fit()",
        "while True:\n    trainer.fit()",
        "def run():\n    trainer.fit()\nrun()",
        "[trainer.fit() for _ in range(2)]",
        "run = lambda: trainer.fit()",
    ],
)
def test_what_cannot_be_begun_in_its_middle_is_refused(source):
    assert rest(source) is None


def test_a_chained_call_is_found_by_its_place_not_by_its_name():
    lines = rest("Trainer(model, data).fit()\nb()", "Trainer(model, data).fit()")
    assert lines == [BEGIN, GO_ON, "b()"]


@pytest.mark.parametrize(
    ("source", "call_text", "left"),
    [
        ("a = 1\nh = trainer.fit(resume=True)\nb()", None, ["h = trainer.go_on()", "b()"]),
        ("with a:\n    trainer.resume()\nb()", None, ["with a:", "    trainer.go_on()", "b()"]),
        ("Trainer(model, data).fit()", "Trainer(model, data).fit()", None),
        ("runs[0].fit()", "runs[0].fit()", None),
        ("for _ in a:\n    trainer.fit()", "trainer.fit()", None),
    ],
)
def test_a_cell_that_has_stopped_goes_on_with_the_trainer_of_that_name(source, call_text, left):
    tree = ast.parse(source)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    node = next(n for n in calls if call_text in (None, ast.unparse(n)))
    if call_text is None:
        node = next(n for n in calls if "trainer" in ast.unparse(n))
    rest = resumed_at(tree, (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset))
    assert (rest if rest is None else ast.unparse(rest).splitlines()) == left


def test_a_cell_outside_fit_has_no_place_to_stop_at():
    assert pause_site(sys._getframe(), {}) == ((), "the cell is not inside fit()")


def test_lines_stay_those_of_the_cell():
    source = "a = 1\n\nh = trainer.fit()\n\nboom()"
    tree = joined_at(ast.parse(source), (3, 4, 3, 17))
    assert [node.lineno for node in tree.body] == [3, 3, 5]


def sites(source, monkeypatch):
    """Return what `call_site` says inside `look()`, called by a cell and by nbdist's code."""
    import linecache

    name = "<a cell>"
    monkeypatch.setitem(linecache.cache, name, (len(source), None, source.splitlines(True), name))
    found = []
    library = {"__name__": "nbdist.train.trainer", "found": found, "sys": sys, "site": call_site}
    exec("def fit(): found.append(site(sys._getframe(), {'<a cell>': 7}))", library)
    exec(compile(source, name, "exec"), {"__name__": "__main__", "fit": library["fit"]})
    return found[0]


def test_the_call_of_the_cell_is_found_from_inside(monkeypatch):
    assert sites("x = 1\ny = [fit()]", monkeypatch) == ((2, 5, 2, 10), "")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def run():\n    fit()\nrun()", "inside run()"),
        ("for _ in range(1):\n    fit()", "in a loop"),
    ],
)
def test_why_a_call_cannot_be_taken_up_is_told(source, why, monkeypatch):
    call, problem = sites(source, monkeypatch)
    assert call == ()
    assert why in problem


def test_a_call_from_another_library_is_refused(monkeypatch):
    del monkeypatch
    call, problem = call_site(sys._getframe(), {"<a cell>": 1})
    assert (call, "not by the cell itself" in problem) == ((), True)
