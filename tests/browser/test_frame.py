"""The frame of the browser tests: a plain widget answers in a real JupyterLab."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import expect

BUTTON = Path(__file__).parent / "notebooks" / "button.ipynb"


def test_button_clicked_in_jupyterlab_writes_its_text(lab, tmp_path):
    lab.open(BUTTON)

    lab.run_all()
    cell = lab.wait_for_cell("Button(", seconds=30)
    cell.get_by_role("button", name="press").click()

    expect(cell.get_by_text("pressed 1 times")).to_be_visible(timeout=10_000)
    assert lab.errors() == lab.page_errors == []
    assert lab.num_running() == 0
    assert lab.screenshot("button", tmp_path).stat().st_size > 10_000


def test_failing_cell_in_jupyterlab_shows_its_traceback(lab):
    lab.open(BUTTON.with_name("failing.ipynb"))

    lab.run_all()
    cell = lab.wait_for_cell("raise ValueError", seconds=30)

    assert "ValueError: on purpose" in lab.outputs(cell)
    assert lab.errors() == ["ValueError: on purpose"]
