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
from nbdist.rank.output import CellOutput, FdCapture, LinkStream
from nbdist.serve.ports import install_port

__all__ = ["open_session"]


def open_session(kernel: Any, link: RankLink, directory: Path) -> Executor:
    """Route all output of the kernel's shell to the link and return the executor of its cells.

    Must be called on the main thread inside the running event loop.
    """
    output = CellOutput(link, directory / "logs" / f"rank-{link.rank}.log")
    captures = []
    for name, fd in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()
        captures.append(FdCapture(output, name, fd))
        setattr(sys, name, LinkStream(output, name, fd))
    shell = kernel.shell
    # `tqdm.auto` would draw a widget, whose model the notebook cannot reach; a rank's bar is text.
    sys.modules["tqdm.autonotebook"] = tqdm.std
    shell.display_pub = LinkDisplayPublisher(parent=shell)  # type: ignore[no-untyped-call]
    shell.display_pub.output = output
    shell.displayhook = LinkDisplayHook(parent=shell, shell=shell)  # type: ignore[no-untyped-call]
    shell.displayhook.output = output
    shell.display_trap.hook = shell.displayhook
    install_port(link)
    executor = Executor(shell, link, output, captures)
    executor.asking.install()
    install_debugger(executor.asking)
    return executor
