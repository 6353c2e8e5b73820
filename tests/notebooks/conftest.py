"""`nbdist quickstart` on a notebook of the test's choice, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]

# the command as it is, with another notebook in the place of the packaged one
_PROGRAM = """\
import pathlib, sys
import nbdist.__main__ as command
command.find_notebook = lambda: pathlib.Path(sys.argv[1])
raise SystemExit(command.main(["quickstart", *sys.argv[2:]]))
"""


@pytest.fixture(scope="session")
def start_quickstart() -> Callable[..., subprocess.Popen]:
    """A function that starts `nbdist quickstart` in `folder`."""

    def start(notebook: Path, folder: Path, *options: str, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(notebook), *options],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture(scope="session")
def run_quickstart(start_quickstart) -> Callable[..., subprocess.CompletedProcess]:
    """A function that runs `nbdist quickstart` in `folder` to its end."""

    def run(
        notebook: Path, folder: Path, *options: str, timeout: float = 100, **environment: str
    ) -> subprocess.CompletedProcess:
        with start_quickstart(notebook, folder, *options, **environment) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.terminate()  # interrupts the cell, then ends the kernel
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


@pytest.fixture(scope="session")
def texts_of(run_quickstart, tmp_path_factory) -> Callable[..., dict[str, str]]:
    """A function that runs a tutorial and returns the text that each cell shows, by its id."""

    def texts(name: str, timeout: float) -> dict[str, str]:
        folder = tmp_path_factory.mktemp(name)
        done = run_quickstart(ROOT / "notebooks" / f"{name}.ipynb", folder, timeout=timeout)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        executed = nbformat.read(folder / "quickstart.ipynb", as_version=4)
        return {
            cell.id: "\n".join(
                output.get("text") or output.get("data", {}).get("text/plain", "")
                for output in cell.outputs
            )
            for cell in executed.cells
            if cell.cell_type == "code"
        }

    return texts


@pytest.fixture
def write_notebook(tmp_path) -> Callable[..., Path]:
    """A function that writes a notebook with a parameters cell and these code cells."""

    def write(*sources: str) -> Path:
        parameters = nbformat.v4.new_code_cell("num_ranks = 2  # how many\nnum_steps = 2")
        parameters.metadata["tags"] = ["parameters"]
        cells = [parameters, *map(nbformat.v4.new_code_cell, sources)]
        path = tmp_path / "source.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
        return path

    return write
