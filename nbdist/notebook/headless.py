"""Runs a notebook headless and writes what its cells show (client; loads no torch)."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbclient import NotebookClient
    from nbformat import NotebookNode

__all__ = ["run_headless", "write"]

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_headless(source: Path, output: Path, ranks: int | None, timeout: int) -> str:
    """Run a notebook from top to bottom, writing what it shows, and save it with its outputs.

    Args:
        source: the notebook.
        output: where to save it; its folder is the kernel's.
        ranks: replaces `num_ranks` of the parameters cell; None leaves it.
        timeout: most seconds for one cell.

    Returns:
        What failed, with the cell and its traceback; an empty text when nothing did.
    """
    import nbformat
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.read(source, as_version=4)
    if ranks is not None:
        _set_parameter(notebook, "num_ranks", ranks)
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
    return failure


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
    """Writes progress. A display that is updated in place is written once, at its cell's end.

    Until then a terminal shows its last line. On a pipe a line that is rewritten with carriage
    returns is written in its last state.
    """

    def __init__(self, num_cells: int) -> None:
        self._num_cells = num_cells
        self._cell = 0
        self._began = 0.0
        self._updatable: dict[str, str] = {}
        self._unfinished: dict[str, str] = {}

    def begin(self, cell: NotebookNode, cell_index: int) -> None:
        if cell.cell_type != "code":
            return
        self._cell += 1
        self._began = time.monotonic()
        first, *rest = cell.source.strip().splitlines() or [""]
        more = f"  (+{len(rest)} lines)" if rest else ""
        write(f"\n[{self._cell}/{self._num_cells}] {first}{more}\n", style="1")

    def end(self, cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        for rest in self._unfinished.values():
            write(_last_state(rest) + "\n" if rest else "")
        self._unfinished.clear()
        self._show_status("")
        for text in self._updatable.values():
            write(text)
        self._updatable.clear()
        write(f"  {time.monotonic() - self._began:.1f} s\n", style="2")

    def _show_status(self, text: str) -> None:
        if sys.stdout.isatty():
            *_, last = text.splitlines() or [""]
            write(f"\r\x1b[K{last[: shutil.get_terminal_size().columns - 1]}\r")

    def _show_text(self, stream: str, text: str) -> None:
        if sys.stdout.isatty():
            write(f"\x1b[K{text}" if self._updatable else text)
            return
        *lines, rest = (self._unfinished.get(stream, "") + text).split("\n")
        self._unfinished[stream] = rest
        write("".join(_last_state(line) + "\n" for line in lines))

    def show(self, msg: dict[str, Any]) -> None:
        kind, content = msg["msg_type"], msg["content"]
        if kind == "stream":
            self._show_text(content["name"], content["text"])
        elif kind in {"display_data", "update_display_data", "execute_result"}:
            text = str(content["data"].get("text/plain", "")).rstrip("\n") + "\n"
            display_id = (content.get("transient") or {}).get("display_id")
            if display_id:
                self._updatable[display_id] = text
                self._show_status(text)
            elif text.strip():
                write(text)


def _last_state(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


def write(text: str, style: str = "") -> None:
    """Write to standard output; colours only on a terminal."""
    if not sys.stdout.isatty():
        text = _COLOURS.sub("", text)
    elif style:
        text = f"\x1b[{style}m{text}\x1b[0m"
    sys.stdout.write(text)
    sys.stdout.flush()


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
