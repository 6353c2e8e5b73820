"""The quickstart notebook, run once by the `nbdist` command; each test looks at one promise."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "00_quickstart.ipynb"
SECONDS = 240  # about 40 s on two cores that do nothing else

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(SECONDS + 30)]

# put in before the last cell: every process below the kernel, the ranks among them
_BEFORE_STOP = """\
import psutil
family = psutil.Process().children(recursive=True)
ranks = {info.pid for info in nbdist.current_world().infos}
print(len(family), ranks <= {process.pid for process in family})
"""
# ... and after it
_AFTER_STOP = """\
_, left = psutil.wait_procs(family, timeout=10)
print([" ".join(process.cmdline()) for process in left])
"""


def _text(cell) -> str:
    """Return what a cell shows, as plain text."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error":
            parts.append("\n".join(output.traceback))
        else:
            parts.append(output.data.get("text/plain", ""))
    return "\n".join(parts)


@pytest.fixture(scope="module")
def shown(run_quickstart, tmp_path_factory) -> dict[str, str]:
    """The text that each cell of the quickstart shows, by the cell's id."""
    folder = tmp_path_factory.mktemp("quickstart")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    new_cell = nbformat.v4.new_code_cell
    notebook.cells.insert(-1, new_cell(_BEFORE_STOP, id="before-stop"))
    notebook.cells.append(new_cell(_AFTER_STOP, id="after-stop"))
    nbformat.write(notebook, folder / "probed.ipynb")

    done = run_quickstart(folder / "probed.ipynb", folder, timeout=SECONDS)

    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    executed = nbformat.read(folder / "quickstart.ipynb", as_version=4)
    return {cell.id: _text(cell) for cell in executed.cells if cell.cell_type == "code"}


def test_quickstart_start_shows_a_table_of_both_ranks(shown):
    for rank in (0, 1):
        assert re.search(rf"\b{rank}\b.*\b(cpu|cuda:{rank})\b", shown["start"])


def test_quickstart_hello_folds_equal_lines_and_keeps_different_ones(shown):
    lines = shown["hello"].splitlines()

    equal = [line for line in lines if "the sum of all ranks is 1" in line]
    assert len(equal) == 1
    assert "[0-1]" in shown["hello"]
    for rank in (0, 1):
        assert any(f"rank {rank} of 2 on" in line for line in lines)


def test_quickstart_training_lowers_the_loss(shown):
    first, last = map(float, re.search(r"loss (\d\.\d+) -> (\d\.\d+)", shown["train"]).groups())

    # ln 512 = 6.24 is a guess among all tokens; the last loss was seen to be near 4.0
    assert 5.9 < first < 6.6
    assert last < first - 1.5


def test_quickstart_resumed_run_repeats_the_losses_bit_for_bit(shown):
    assert "resumed at step 60" in shown["resume"]
    assert "losses equal, bit for bit: True" in shown["resume"]


def test_quickstart_pull_brings_one_equal_value_from_each_rank(shown):
    last_losses = ast.literal_eval(shown["pull"].strip().splitlines()[-1])

    assert list(last_losses) == [0, 1]
    assert last_losses[0] == last_losses[1] > 0


def test_quickstart_generates_text_for_every_prompt(shown):
    answers = [ast.literal_eval(line) for line in shown["generate"].strip().splitlines()]

    assert len(answers) == 3
    assert all(answers)


def test_quickstart_widget_has_a_plain_text_form(shown):
    assert "GenerateWidget" in shown["widget"]


def test_quickstart_stop_leaves_no_process_of_the_world(shown):
    num_processes, ranks_among_them = shown["before-stop"].split()

    assert int(num_processes) > 2
    assert ranks_among_them == "True"
    assert json.loads(shown["after-stop"].replace("'", '"')) == []


def test_quickstart_shows_no_traceback_anywhere(shown):
    assert [name for name, text in shown.items() if "Traceback" in text] == []
