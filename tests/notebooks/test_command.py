"""The `nbdist quickstart` command on small notebooks that start no ranks."""

from __future__ import annotations

import signal
import sys

import nbformat
import psutil


def test_quickstart_of_a_sound_notebook_prints_and_saves_outputs(
    write_notebook, run_quickstart, tmp_path
):
    notebook = write_notebook("print('shown', 6 * 7)", "'a ' + 'value'")

    done = run_quickstart(notebook, tmp_path, "--output", "run.ipynb")

    assert done.returncode == 0, done.stderr
    assert "[2/3] print('shown', 6 * 7)\nshown 42\n" in done.stdout
    assert "'a value'" in done.stdout
    assert str(tmp_path / "run.ipynb") in done.stdout.splitlines()[-1]
    assert "\x1b" not in done.stdout  # no colours in a pipe
    saved = nbformat.read(tmp_path / "run.ipynb", as_version=4)
    assert saved.cells[1].outputs[0].text == "shown 42\n"


def test_quickstart_with_a_failing_cell_shows_it_and_returns_one(
    write_notebook, run_quickstart, tmp_path
):
    notebook = write_notebook("def half(x):\n    return x / 0", "half(1)", "print('never')")

    done = run_quickstart(notebook, tmp_path)

    assert done.returncode == 1
    assert "this cell failed:\n    half(1)\n" in done.stdout
    assert "ZeroDivisionError: division by zero" in done.stdout
    assert "never" not in done.stdout
    assert "nbdist: the quickstart failed after" in done.stderr
    assert (tmp_path / "quickstart.ipynb").is_file()


def test_quickstart_with_ranks_changes_the_parameter_only(write_notebook, run_quickstart, tmp_path):
    notebook = write_notebook("print(num_ranks, num_steps)")

    done = run_quickstart(notebook, tmp_path, "-n", "3")

    assert "\n3 2\n" in done.stdout
    saved = nbformat.read(tmp_path / "quickstart.ipynb", as_version=4)
    assert saved.cells[0].source == "num_ranks = 3  # how many\nnum_steps = 2"


def test_quickstart_runs_in_this_python_without_any_kernelspec_or_home(
    write_notebook, run_quickstart, tmp_path
):
    notebook = write_notebook("import sys; print(sys.executable)")
    nowhere = {"JUPYTER_PATH": "", "JUPYTER_NO_CONFIG": "1", "HOME": "/proc/no-such-home"}
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        nowhere[name] = "/proc/no-such-home/x"

    done = run_quickstart(notebook, tmp_path, **nowhere)

    assert done.returncode == 0, done.stderr
    assert f"\n{sys.executable}\n" in done.stdout


def test_quickstart_cell_over_its_timeout_ends_with_its_kernel(
    write_notebook, run_quickstart, tmp_path
):
    notebook = write_notebook(
        "import os, time; print('pid', os.getpid(), flush=True)\nwhile True: time.sleep(0.1)"
    )

    done = run_quickstart(notebook, tmp_path, "--timeout", "2")

    assert done.returncode == 1
    assert "CellTimeoutError" in done.stdout
    pid = int(done.stdout.split("pid ")[1].split()[0])
    assert not psutil.pid_exists(pid)


def test_quickstart_interrupted_interrupts_its_cell_and_ends_its_kernel(
    write_notebook, start_quickstart, tmp_path
):
    notebook = write_notebook(
        "import os, time; print('pid', os.getpid(), flush=True)\nwhile True: time.sleep(0.1)"
    )

    with start_quickstart(notebook, tmp_path) as command:
        for line in command.stdout:
            if line.startswith("pid "):
                break
        command.send_signal(signal.SIGINT)
        rest, _ = command.communicate(timeout=30)

    assert command.returncode == 1
    assert "KeyboardInterrupt" in rest
    assert not psutil.pid_exists(int(line.split()[1]))


def test_quickstart_into_a_missing_folder_names_it(write_notebook, run_quickstart, tmp_path):
    done = run_quickstart(write_notebook(), tmp_path, "--output", "nowhere/run.ipynb")

    assert done.returncode == 1
    assert f"make {tmp_path / 'nowhere'}" in done.stderr


def test_quickstart_with_no_ranks_is_refused_before_anything_runs(
    write_notebook, run_quickstart, tmp_path
):
    done = run_quickstart(write_notebook(), tmp_path, "-n", "0")

    assert done.returncode == 2
    assert "'0' was given; a whole number from 1 is needed" in done.stderr
    assert not (tmp_path / "quickstart.ipynb").exists()


def test_quickstart_lab_copies_once_and_keeps_a_changed_notebook(
    write_notebook, run_quickstart, tmp_path
):
    fake = tmp_path / "fake" / "jupyterlab"
    fake.mkdir(parents=True)
    fake.joinpath("__init__.py").touch()
    fake.joinpath("__main__.py").write_text("import sys; print('lab got', sys.argv[1:])")
    notebook, copy = write_notebook("1"), tmp_path / "quickstart.ipynb"
    paths = {"PYTHONPATH": f"{fake.parent}:{__file__.rsplit('/tests/', 1)[0]}"}

    first = run_quickstart(notebook, tmp_path, "--lab", **paths)
    copy.write_text("changed")
    second = run_quickstart(notebook, tmp_path, "--lab", **paths)

    assert f"lab got ['{copy}', '--ip=127.0.0.1'" in first.stdout, first.stderr
    assert "copied the quickstart to" in first.stdout
    assert "opening the quickstart.ipynb that is here already" in second.stdout
    assert copy.read_text() == "changed"
