"""Turns an ipyparallel engine's shell into a host of cells (rank)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tqdm.std

from nbdist.rank.debugger import install_debugger
from nbdist.rank.display import LinkDisplayHook, LinkDisplayPublisher
from nbdist.rank.executor import Executor
from nbdist.rank.link import RankLink
from nbdist.rank.log import log_path
from nbdist.rank.output import CellOutput, FdCapture, LinkStream
from nbdist.rank.terminal import draw_rich_as_text
from nbdist.serve.ports import install_port

__all__ = ["open_session"]


def open_session(kernel: Any, link: RankLink, directory: Path) -> Executor:
    """Route all output of the kernel's shell to the link and return the executor of its cells.

    Must be called on the main thread inside the running event loop.
    """
    output = CellOutput(link, log_path(directory, link.rank))
    captures = []
    for name, fd in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()
        captures.append(FdCapture(output, name, fd))
        setattr(sys, name, LinkStream(output, name, fd))
    shell = kernel.shell
    # They would draw widgets, whose models the notebook cannot reach; a rank's bar is text.
    sys.modules["tqdm.autonotebook"] = sys.modules["tqdm.notebook"] = tqdm.std
    tqdm.notebook = tqdm.std
    draw_rich_as_text()
    shell.display_pub = LinkDisplayPublisher(parent=shell)  # type: ignore[no-untyped-call]
    shell.display_pub.output = output
    shell.displayhook = LinkDisplayHook(parent=shell, shell=shell)  # type: ignore[no-untyped-call]
    shell.displayhook.output = output
    shell.display_trap.hook = shell.displayhook
    # IPython would set every traceback a second time, for a history that nobody reads here.
    shell._format_exception_for_storage = lambda *_args, **_kwargs: {}
    install_port(link)
    executor = Executor(shell, link, output, captures)
    executor.asking.install()
    install_debugger(executor.asking)
    return executor
