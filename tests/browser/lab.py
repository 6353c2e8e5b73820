"""A notebook in JupyterLab as a user sees it: opened, run by clicks, read from the page."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page
    from server import LabServer

OPEN_MS = 60_000
_RUNNING, _DONE = re.compile(r"\[\*\]"), re.compile(r"\[\d+\]")
# an error looks like text on stderr in the page; the notebook's model tells them apart
_ERRORS = """() => Array.from(window.jupyterapp.shell.currentWidget.content.model.cells)
    .flatMap(cell => cell.sharedModel.toJSON().outputs ?? [])
    .filter(output => output.output_type === 'error')
    .map(output => `${output.ename}: ${output.evalue}`)"""


class Lab:
    """One browser page with one notebook of a `LabServer`.

    Attributes:
        page_errors: exceptions of the page's own code, such as a widget's, that nothing caught.
    """

    def __init__(self, page: Page, server: LabServer) -> None:
        self.page = page
        self.server = server
        self.page_errors: list[str] = []
        page.on("pageerror", lambda error: self.page_errors.append(str(error)))

    def open(self, notebook: Path) -> None:
        """Open a fresh copy of a notebook; returns when its kernel can take a cell."""
        shutil.copyfile(notebook, self.server.folder / notebook.name)
        self.page.goto(
            f"{self.server.url}/lab/tree/{notebook.name}?token={self.server.token}&reset",
            timeout=OPEN_MS,
        )
        self.panel.locator(".jp-Cell").first.wait_for(timeout=OPEN_MS)
        self.page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.sessionContext"
            "?.session?.kernel?.connectionStatus === 'connected'",
            timeout=OPEN_MS,
        )

    @property
    def panel(self) -> Locator:
        """The notebook that is shown."""
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")

    @property
    def code_cells(self) -> Locator:
        """The code cells that the page holds, in order."""
        return self.panel.locator(".jp-CodeCell")

    def run_all(self) -> None:
        """Click Run > Run All Cells."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()

    def cell(self, text: str) -> Locator:
        """Return the code cell whose source contains `text`."""
        return self.code_cells.filter(has=self.page.locator(".jp-InputArea", has_text=text)).first

    def wait_for_cell(self, text: str, seconds: float) -> Locator:
        """Wait until the cell that contains `text` has its number; returns it.

        The prompt is the sign: a kernel says `idle` while a cell runs when it answers a widget.
        """
        cell = self.cell(text)
        cell.scroll_into_view_if_needed()
        expect(cell.locator(".jp-InputPrompt")).to_have_text(_DONE, timeout=seconds * 1000)
        return cell

    def outputs(self, cell: Locator) -> str:
        """Return the text of a cell's outputs, tracebacks included."""
        return "\n".join(cell.locator(".jp-OutputArea-output").all_inner_texts())

    def errors(self) -> list[str]:
        """Return `Name: value` of every error output in the notebook."""
        return self.page.evaluate(_ERRORS)

    def num_running(self) -> int:
        """Return how many cells have a star in their prompt."""
        return self.panel.locator(".jp-InputPrompt", has_text=_RUNNING).count()

    def screenshot(self, name: str, fallback: Path) -> Path:
        """Save the page as `name`.png in $NBDIST_SCREENSHOTS, else in `fallback`."""
        folder = Path(os.environ.get("NBDIST_SCREENSHOTS") or fallback)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.png"
        self.page.screenshot(path=path)
        return path
