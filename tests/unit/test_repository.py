"""What the repository promises around the code: commands, notebooks, versions, pins."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_CELL_LINES = 20

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def _readme_commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def _ci_commands() -> list[str]:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def _source(cell: dict) -> str:
    return "".join(cell["source"])


# --- commands -------------------------------------------------------------------------------


def test_readme_test_command_is_the_last_that_ci_runs():
    [tested] = [command for command in _readme_commands() if "pytest" in command]

    assert tested.split(" && ")[-1] == _ci_commands()[-1]


def test_readme_and_ci_install_the_same_way():
    install = re.compile(r"install -q (-c constraints\.txt -e '\.\[dev\]')")
    [tested] = [command for command in _readme_commands() if "pytest" in command]

    in_ci = install.search("\n".join(_ci_commands()))
    assert in_ci
    assert in_ci.group(1) == install.search(tested).group(1)


def test_ci_checks_lint_and_types_before_tests():
    tail = [
        command for command in _ci_commands() if re.match(r"ruff|mypy|python -m pytest", command)
    ]

    assert tail == ["ruff check .", "ruff format --check .", "mypy", "python -m pytest"]


def test_ci_script_is_executable_and_parses():
    script = ROOT / ".ci" / "run"

    assert script.stat().st_mode & 0o111 == 0o111
    subprocess.run(["bash", "-n", script], check=True)


def test_readme_quickstart_commands_parse():
    used = [
        shlex.split(command.split(" && ")[-1])
        for command in _readme_commands()
        if "nbdist quickstart" in command
    ]

    assert [words[0] for words in used] == [".venv/bin/nbdist"] * 2
    for words in used:
        done = subprocess.run(
            [sys.executable, "-m", "nbdist", *words[1:], "--help"],
            cwd=ROOT,
            capture_output=True,
            check=False,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr


def test_console_script_points_to_a_function():
    module, _, name = PROJECT["scripts"]["nbdist"].partition(":")

    assert callable(getattr(importlib.import_module(module), name))


# --- versions and pins ----------------------------------------------------------------------


def test_version_is_written_in_one_place_only():
    import nbdist

    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT
    assert re.fullmatch(r"\d+\.\d+\.\d+([a-z0-9.]+)?", nbdist.__version__)
    done = subprocess.run(
        [sys.executable, "-m", "nbdist", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"nbdist {nbdist.__version__}\n"


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return dict(pairs)


def test_constraints_pin_names_to_versions_and_nothing_else():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    odd = [line for line in lines if not re.fullmatch(r"#.*|[a-z0-9-]+==[\w.]+", line)]

    assert odd == []


def test_constraints_satisfy_every_requirement_of_the_project():
    extras = dict(PROJECT["optional-dependencies"])
    del extras["vllm"]  # not of the dev extra, whose closure is pinned: it pins a torch of its own
    groups = (PROJECT["dependencies"], *extras.values())
    wanted = [Requirement(text) for texts in groups for text in texts]
    pins = _pins()

    unmet = {
        str(requirement)
        for requirement in wanted
        if requirement.name != "nbdist"
        and not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "0"))
    }
    assert unmet == set()


def test_changelog_starts_with_what_is_unreleased():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert headings[0] == "[Unreleased]"


# --- notebooks ------------------------------------------------------------------------------


def test_notebooks_are_there():
    assert (ROOT / "notebooks" / "00_quickstart.ipynb") in NOTEBOOKS


@each_notebook
def test_notebook_is_stored_without_outputs(path):
    ran = [
        _source(cell)
        for cell in _cells(path)
        if cell["cell_type"] == "code" and (cell["outputs"] or cell["execution_count"] is not None)
    ]

    assert ran == []
    assert "widgets" not in json.loads(path.read_text())["metadata"]


@each_notebook
def test_notebook_cells_fit_on_a_screen(path):
    sizes = [len(_source(cell).splitlines()) for cell in _cells(path)]

    assert max(sizes) <= MAX_CELL_LINES


@each_notebook
def test_notebook_names_no_path_of_one_machine(path):
    absolute = re.compile(
        r"(?<![\w.:/~])/(?:home|root|tmp|work|mnt|data|Users|opt|var|scratch)\b/?"
    )

    assert absolute.findall(path.read_text()) == []


@each_notebook
def test_notebook_opens_with_words_and_has_one_parameters_cell(path):
    cells = _cells(path)

    assert cells[0]["cell_type"] == "markdown"
    tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1


@each_notebook
def test_notebook_ends_by_stopping_the_world(path):
    code = [_source(cell) for cell in _cells(path) if cell["cell_type"] == "code"]

    assert code[-1].rstrip().endswith("%distributed stop")


# --- binder ---------------------------------------------------------------------------------


def test_binder_installs_every_requirement_of_the_project_by_the_same_pins():
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["mpi"], *extras["plot"]]
    lines = (ROOT / "binder" / "requirements.txt").read_text().splitlines()

    assert "-c ../constraints.txt" in lines
    assert {Requirement(text).name for text in wanted} <= set(lines)


def test_binder_start_hands_over_to_the_server():
    script = ROOT / "binder" / "start"

    done = subprocess.run(
        [script, "printenv", "OMPI_MCA_btl"], capture_output=True, text=True, check=True
    )

    assert done.stdout == "^ofi\n"
