"""A rank's question in JupyterLab: typed into the box under the cell, and stopped there."""

from __future__ import annotations

import re

import nbformat
import pytest
from playwright.sync_api import expect

CELLS = [
    "%load_ext nbdist",
    "%distributed start -n 2",
    "%%distributed\nname = input('name? ') if rank == 1 else 'nobody'\nprint('hello', name)",
    "%%distributed\ninput('both? ')",
    "%%distributed\nprint('never', 'run')",
]
START_SECONDS, ANSWER_SECONDS = 90, 30

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def asking(tmp_path):
    """A notebook whose ranks ask."""
    path = tmp_path / "asking.ipynb"
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)
    return path


def box_of(cell, prompt):
    """Wait until the cell asks; return where to type."""
    box = cell.locator(".jp-Stdin").last
    expect(box.locator(".jp-Stdin-prompt")).to_have_text(prompt, timeout=ANSWER_SECONDS * 1000)
    return box.locator("input")


def test_rank_gets_what_is_typed_and_stop_ends_a_prompt(lab, asking, tmp_path):
    lab.open(asking)
    answered, stopped = lab.cell("name = input"), lab.cell("both? ")

    lab.run_all()
    lab.wait_for_cell("%distributed start", START_SECONDS)
    box = box_of(answered, "[rank 1] name? ")
    lab.screenshot("prompt", tmp_path)
    box.fill("Ada")
    box.press("Enter")
    lab.wait_for_cell("name = input", ANSWER_SECONDS)
    assert "[0] hello nobody" in lab.outputs(answered)
    assert "[1] hello Ada" in lab.outputs(answered)

    stale = box_of(stopped, re.compile(r"\[rank [01]\] both\? "))
    lab.page.evaluate("() => window.jupyterapp.commands.execute('notebook:interrupt-kernel')")
    lab.wait_for_cell("both? ", ANSWER_SECONDS)
    [error] = lab.errors()
    assert error.startswith("KeyboardInterrupt: stopped on the ranks")

    # JupyterLab leaves the box of a stopped cell there: what is typed into it goes nowhere.
    stale.fill("late")
    stale.press("Enter")
    answered.locator(".jp-InputArea-editor").click()
    # the command ends when the cell does: it is not waited for
    lab.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell') }")
    box = box_of(answered, "[rank 1] name? ")
    box.fill("Bob")
    box.press("Enter")
    expect(answered).to_contain_text("[1] hello Bob", timeout=ANSWER_SECONDS * 1000)
    assert lab.page_errors == []
