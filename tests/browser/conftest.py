"""A system Chromium and a JupyterLab server of our own; without a browser the tests are skipped.

With NBDIST_REQUIRE_BROWSER=1 a missing browser is a failure.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `lab` and `server`, which are no tests

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_ARGUMENTS = [
    "--no-sandbox",  # root in a container has no user namespace to make one from
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def _lacking() -> str:
    """Return what a browser test lacks here, or an empty text."""
    if not any(map(shutil.which, _BROWSERS)):
        return f"no browser found: none of {', '.join(_BROWSERS)} is on PATH; install chromium"
    for module in ("playwright", "jupyterlab"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed; pip install -e '.[dev]'"
    return ""


# one a file, not one a session: while it is open, Playwright's event loop runs in this thread,
# and no other test could use asyncio
@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    if lacking := _lacking():
        if os.environ.get("NBDIST_REQUIRE_BROWSER") == "1":
            pytest.fail(f"NBDIST_REQUIRE_BROWSER=1, but {lacking}")
        pytest.skip(lacking)
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, _BROWSERS)))
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=_ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory):
    """A running `LabServer`, for the tests of one file."""
    from server import LabServer

    running = LabServer(tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("server"))
    yield running
    running.stop()


@pytest.fixture
def lab(browser, server):
    """A `Lab` in a browser window of its own; its kernels end with the test."""
    from lab import Lab

    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    yield Lab(context.new_page(), server)
    context.close()
    server.end_sessions()
