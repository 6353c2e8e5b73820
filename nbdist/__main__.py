"""The `nbdist` command (anywhere; loads no torch).

`nbdist quickstart` runs the packaged notebook from top to bottom in a kernel of this Python, and
shows each cell's text as it comes. It knows the notebook as a file only.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path

from nbdist import __version__
from nbdist.errors import NbdistError

__all__ = ["main"]

_NOTEBOOK = "00_quickstart.ipynb"


def main(argv: list[str] | None = None) -> int:
    """Run the `nbdist` command; returns its exit code: 0 done, 1 failed, 2 wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="nbdist", description="Distributed PyTorch from a notebook."
    )
    parser.add_argument("--version", action="version", version=f"nbdist {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    quickstart = commands.add_parser(
        "quickstart",
        help="run the quickstart notebook here, or open it in JupyterLab",
        description="Run the quickstart notebook headless and save it with its outputs.",
    )
    add = quickstart.add_argument
    add("-n", "--ranks", type=_positive, help="ranks to start (as the notebook says: 2)")
    add("--output", type=Path, default=Path("quickstart.ipynb"), help="the notebook to write")
    add("--timeout", type=_positive, default=300, metavar="S", help="most seconds for one cell")
    add("--lab", action="store_true", help="open a copy in JupyterLab instead of running it")
    quickstart.set_defaults(command=_quickstart)
    worlds = commands.add_parser("worlds", help="list the running worlds of this user")
    worlds.set_defaults(command=_worlds)
    stop = commands.add_parser("stop", help="end a running world, whoever started it")
    stop.add_argument("world_id", help="as `nbdist worlds` lists it")
    stop.set_defaults(command=_stop)
    arguments = parser.parse_args(argv)
    return int(arguments.command(arguments))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} was given; a whole number from 1 is needed")
    return int(text)


def _quickstart(arguments: argparse.Namespace) -> int:
    output: Path = arguments.output.absolute()
    if not output.parent.is_dir():
        return _fail(f"--output {output} needs a folder that is not there; make {output.parent}")
    try:
        source = find_notebook()
        if arguments.lab:
            return _open_lab(source, output)
        return _run(source, output, arguments.ranks, arguments.timeout)
    except OSError as error:
        return _fail(str(error))


def find_notebook() -> Path:
    """Return the quickstart notebook: in the installed package, or else beside it in a checkout.

    Raises:
        FileNotFoundError: it is in neither place.
    """
    package = Path(__file__).resolve().parent
    places = [package / "_notebooks" / _NOTEBOOK, package.parent / "notebooks" / _NOTEBOOK]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(
        f"the quickstart notebook was looked for at {places[0]} and {places[1]} and is at neither; "
        "install nbdist again"
    )


def _worlds(_arguments: argparse.Namespace) -> int:
    from nbdist.runfiles import list_worlds

    for world in list_worlds():
        minutes = (time.time() - world.started_at) / 60
        kept = ", kept" if world.keep else ""
        print(f"{world.world_id}  {world.num_ranks} ranks, {minutes:.0f} min old{kept}")
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    from nbdist.cluster.launch import end_world
    from nbdist.runfiles import find_world

    try:
        end_world(find_world(arguments.world_id))
    except NbdistError as error:
        return _fail(str(error))
    return 0


def _run(source: Path, output: Path, ranks: int | None, timeout: int) -> int:
    from nbdist.notebook.headless import run_headless, write

    began = time.monotonic()
    failure = run_headless(source, output, ranks, timeout)
    took = f"{time.monotonic() - began:.0f} s"
    if failure:
        write("\n" + failure.rstrip() + "\n")
        return _fail(f"the quickstart failed after {took}; what it did is in {output}")
    write(f"\ndone in {took}; the notebook with its outputs is {output}\n")
    return 0


# --- in JupyterLab --------------------------------------------------------------------------


def _open_lab(source: Path, output: Path) -> int:  # noqa: RET503 - execv does not return
    if importlib.util.find_spec("jupyterlab") is None:
        return _fail("--lab needs JupyterLab, which this Python has not; pip install jupyterlab")
    if output.exists():
        print(f"opening the {output.name} that is here already; delete it for a fresh one")
    else:
        shutil.copyfile(source, output)
        print(f"copied the quickstart to {output}")
    sys.stdout.flush()
    command = [sys.executable, "-m", "jupyterlab", str(output), "--ip=127.0.0.1"]
    if os.geteuid() == 0:
        command.append("--allow-root")
    os.execv(sys.executable, command)  # noqa: S606 - the server takes this process's place


def _fail(text: str) -> int:
    sys.stdout.flush()
    print(f"nbdist: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
