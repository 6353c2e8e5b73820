"""The quickstart in JupyterLab: run by clicks, then a prompt typed into the live model's box."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "00_quickstart.ipynb"
START_SECONDS, TRAIN_SECONDS, TOKEN_SECONDS = 60, 120, 30

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

# notes the length of the answer at every change of the cell's page
_RECORD_SIZES = """cell => {
    window.answerSizes = [];
    const note = () => {
        const answer = cell.querySelector('.nbdist-generate-answer');
        if (answer) window.answerSizes.push(answer.textContent.length);
    };
    const changes = {subtree: true, childList: true, characterData: true};
    new MutationObserver(note).observe(cell, changes);
}"""


@pytest.fixture
def open_ended(tmp_path) -> Path:
    """The quickstart without its last cell, so that the model is there to be asked."""
    notebook = json.loads(NOTEBOOK.read_text())
    notebook["cells"] = [cell for cell in notebook["cells"] if cell["id"] != "stop"]
    path = tmp_path / "quickstart.ipynb"
    path.write_text(json.dumps(notebook))
    return path


def test_prompt_typed_into_the_quickstart_widget_is_answered_piece_by_piece(
    lab, open_ended, tmp_path
):
    lab.open(open_ended)

    lab.run_all()
    lab.wait_for_cell("%distributed start", START_SECONDS)
    lab.wait_for_cell("history = trainer.fit()", TRAIN_SECONDS)
    cell = lab.wait_for_cell("nbdist.GenerateWidget(", TRAIN_SECONDS)
    assert lab.errors() == lab.page_errors == []
    cell.evaluate(_RECORD_SIZES)
    cell.get_by_label("Prompt", exact=True).fill("ROMEO:")
    cell.get_by_label("Max new tokens").fill("100")
    cell.get_by_role("button", name="Send").click()

    card = cell.locator(".nbdist-generate-card").first
    expect(card.locator(".nbdist-generate-state")).to_contain_text(
        "done", timeout=TOKEN_SECONDS * 1000
    )
    expect(card).to_contain_text("100 tokens")
    expect(card).to_contain_text("tok/s")
    expect(cell.locator(".nbdist-generate-memory")).to_contain_text("cache: ")
    lab.screenshot("quickstart-widget", tmp_path)
    sizes = lab.page.evaluate("window.answerSizes")
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 3  # it grew: empty, some, more, all
    assert lab.num_running() == 0
