"""The `nbdist` command (anywhere; loads no torch).

`nbdist quickstart` runs the packaged notebook from top to bottom in a kernel of this Python, and
shows each cell's text as it comes. It knows the notebook as a file only.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist import __version__

if TYPE_CHECKING:
    from nbclient import NotebookClient
    from nbformat import NotebookNode

__all__ = ["main"]

_NOTEBOOK = "00_quickstart.ipynb"
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


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
    return _quickstart(parser.parse_args(argv))


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
        return _run_headless(source, output, arguments.ranks, arguments.timeout)
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


# --- headless -------------------------------------------------------------------------------


def _run_headless(source: Path, output: Path, ranks: int | None, timeout: int) -> int:
    import nbformat
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.read(source, as_version=4)
    if ranks is not None:
        _set_parameter(notebook, "num_ranks", ranks)
    began = time.monotonic()
    failure = ""
    with tempfile.TemporaryDirectory(prefix="nbdist-", ignore_cleanup_errors=True) as own:
        _lend_folders(Path(own))
        client = _client(notebook, output.parent, timeout)
        try:
            asyncio.run(_execute(client))
        except CellExecutionError:
            failure = _describe_failure(notebook)
        except (CellTimeoutError, DeadKernelError, RuntimeError) as error:
            failure = f"{type(error).__name__}: {error}"
    nbformat.write(notebook, output)
    took = f"{time.monotonic() - began:.0f} s"
    if failure:
        _write("\n" + failure.rstrip() + "\n")
        return _fail(f"the quickstart failed after {took}; what it did is in {output}")
    _write(f"\ndone in {took}; the notebook with its outputs is {output}\n")
    return 0


async def _execute(client: NotebookClient) -> None:
    """Run all cells; however it ends, the kernel is gone afterwards, and its world with it."""
    manager: Any = client.km
    interrupts = []

    def pass_signals_on(notebook: NotebookNode) -> None:
        # nbclient's own handlers take the kernel away from under the execution
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(
                number, lambda: interrupts.append(loop.create_task(manager.interrupt_kernel()))
            )

    client.on_notebook_start = pass_signals_on
    try:
        await client.async_execute()
    finally:
        await manager.shutdown_kernel()


def _describe_failure(notebook: NotebookNode) -> str:
    """Return the source and the traceback of the cell that raised."""
    for cell in notebook.cells:
        for shown in cell.get("outputs", []):
            if shown.output_type == "error":
                source = "\n".join("    " + line for line in cell.source.splitlines())
                return f"this cell failed:\n{source}\n\n" + "\n".join(shown.traceback)
    return "a cell failed without a traceback"


def _set_parameter(notebook: NotebookNode, name: str, value: int) -> None:
    """Change `name = ...` in the cell tagged `parameters`."""
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source, changed = re.subn(
                rf"(?m)^{name} = [^#\n]*?(?= *(#|$))", f"{name} = {value}", cell.source
            )
            assert changed == 1, f"the parameters cell sets {name} {changed} times, not once"
            return
    raise AssertionError("the notebook has no cell tagged `parameters`")


def _client(notebook: NotebookNode, folder: Path, timeout: int) -> NotebookClient:
    """Return what executes `notebook` in `folder`, in a kernel of this interpreter."""
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    class ThisPython(KernelSpecManager):
        """Offers the running interpreter, whatever kernels are or are not installed."""

        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            return KernelSpec(
                argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                display_name=kernel_name,
                language="python",
                metadata={"supported_encryption": "curve"},
            )

    class Narrated(NotebookClient):
        """Writes each cell's text while it runs."""

        def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
            narrator.show(msg)
            return super().process_message(msg, cell, cell_index)

    narrator = _Narrator(len([cell for cell in notebook.cells if cell.cell_type == "code"]))
    manager = AsyncKernelManager(
        kernel_spec_manager=ThisPython(), kernel_name="python3", transport_encryption="auto"
    )
    return Narrated(
        notebook,
        km=manager,
        timeout=timeout,
        resources={"metadata": {"path": str(folder)}},
        on_cell_execute=narrator.begin,
        on_cell_executed=narrator.end,
    )


class _Narrator:
    """Writes progress. A display that is updated in place is written once, at its cell's end."""

    def __init__(self, num_cells: int) -> None:
        self._num_cells = num_cells
        self._cell = 0
        self._began = 0.0
        self._updatable: dict[str, str] = {}

    def begin(self, cell: NotebookNode, cell_index: int) -> None:
        if cell.cell_type != "code":
            return
        self._cell += 1
        self._began = time.monotonic()
        first, *rest = cell.source.strip().splitlines() or [""]
        more = f"  (+{len(rest)} lines)" if rest else ""
        _write(f"\n[{self._cell}/{self._num_cells}] {first}{more}\n", style="1")

    def end(self, cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        for text in self._updatable.values():
            _write(text)
        self._updatable.clear()
        _write(f"  {time.monotonic() - self._began:.1f} s\n", style="2")

    def show(self, msg: dict[str, Any]) -> None:
        kind, content = msg["msg_type"], msg["content"]
        if kind == "stream":
            _write(content["text"])
        elif kind in {"display_data", "update_display_data", "execute_result"}:
            text = str(content["data"].get("text/plain", "")).rstrip("\n") + "\n"
            display_id = (content.get("transient") or {}).get("display_id")
            if display_id:
                self._updatable[display_id] = text
            elif text.strip():
                _write(text)


def _write(text: str, style: str = "") -> None:
    """Write to standard output; colours only on a terminal."""
    if not sys.stdout.isatty():
        text = _COLOURS.sub("", text)
    elif style:
        text = f"\x1b[{style}m{text}\x1b[0m"
    sys.stdout.write(text)
    sys.stdout.flush()


def _fail(text: str) -> int:
    sys.stdout.flush()
    print(f"nbdist: {text}", file=sys.stderr)
    return 1


def _lend_folders(own: Path) -> None:
    """Let Jupyter and IPython use folders under `own` for each of theirs that cannot be written."""
    from IPython.paths import get_ipython_dir
    from jupyter_core.paths import jupyter_data_dir, jupyter_runtime_dir

    places = {
        "JUPYTER_RUNTIME_DIR": jupyter_runtime_dir,
        "JUPYTER_DATA_DIR": jupyter_data_dir,
        "IPYTHONDIR": get_ipython_dir,
    }
    lacking = [name for name, place in places.items() if not _can_write(Path(place()))]
    os.environ.update({name: str(own / name.lower()) for name in lacking})


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    raise SystemExit(main())
