"""The command line of the magics (client)."""

from __future__ import annotations

import argparse
import shlex
from typing import NoReturn

from IPython.core.error import UsageError

from nbdist.notebook import served, shelf

__all__ = ["cell_parser", "line_parser", "parse", "COMMANDS"]

COMMANDS = {
    "start": "start ranks and make their process group",
    "status": "show ranks, devices and what runs",
    "stop": "end the world and all its processes",
    "attach": "use a world that runs already",
    "heal": "start a process for each rank that died; the others keep their variables",
    "restart": "end ranks and start them anew; their variables go",
    "incidents": "list the deaths of ranks in cells that survive them, and what was done",
    "resize": "start or end ranks until there are N; trainers go on with the ranks there are",
    "interrupt": "stop the cell that runs on the ranks",
    "debug": "open the debugger where a rank's last cell failed",
    "push": "copy names from this notebook to the ranks",
    "pull": "copy a name from the ranks to this notebook",
    "who": "list the names on the ranks, and whether their values differ",
    "logs": "show what a rank has written, whole",
    "checkpoints": "list, verify, restore or export what a trainer has saved",
    "serve": "load a model on the ranks and answer prompts, or list what is served",
    "unload": "stop serving a model and give back its memory",
    "auto": "run every cell on the ranks, or stop doing so",
}


class _Help(Exception):  # noqa: N818 - leaves argparse after it has printed its help
    pass


class _Parser(argparse.ArgumentParser):
    """An argparse parser that reports to the notebook instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; type `{self.prog} --help` for what it takes")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise _Help(message or status)


def parse(parser: argparse.ArgumentParser, line: str) -> argparse.Namespace | None:
    """Return the arguments of a magic line; None when it asked for help, which was printed.

    Raises:
        UsageError: says which argument was not understood.
    """
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise UsageError(f"{parser.prog}: {error} in {line!r}") from None
    try:
        return parser.parse_args(words)
    except _Help:
        return None


def cell_parser() -> argparse.ArgumentParser:
    """Return the parser of `%%distributed`."""
    parser = _Parser(
        prog="%%distributed",
        description="Run the cell on the ranks. On a rank it finds the names rank, world_size, "
        "local_rank, device, mesh and nbdist.",
    )
    _ranks(parser)
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="stop the cell after S seconds; names are kept"
    )
    parser.add_argument("--quiet", action="store_true", help="show output only if the cell fails")
    return parser


def line_parser() -> argparse.ArgumentParser:
    """Return the parser of `%distributed` with its commands."""
    parser = _Parser(
        prog="%distributed",
        description="Ranks for this notebook. Cells that begin with %%distributed run on them.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    made = {name: commands.add_parser(name, help=text, description=text.capitalize() + ".")
            for name, text in COMMANDS.items()}  # fmt: skip
    _start(made["start"])
    made["attach"].add_argument("world_id", nargs="?", help="needed when several worlds run")
    made["resize"].add_argument(
        "-n", dest="num_ranks", type=int, metavar="N", required=True, help="number of ranks"
    )
    debug = made["debug"]
    debug.add_argument("rank", nargs="?", type=int, help="default: the rank that failed first")
    debug.add_argument("-r", "--rank", dest="option", type=int, metavar="RANK", help="the same")
    made["push"].add_argument("names", nargs="+", help="names of this notebook")
    made["pull"].add_argument("name", help="a name on the ranks")
    made["pull"].add_argument(
        "--as", dest="target", metavar="NAME", help="the local name that gets {rank: value}"
    )
    made["who"].add_argument("pattern", nargs="?", help="such as x*; default: all names")
    logs = made["logs"]
    logs.add_argument("--tail", type=int, default=0, metavar="N", help="only the last N lines")
    for name in ("restart", "push", "pull", "logs"):
        _ranks(made[name])
    shelf.add_arguments(made["checkpoints"], _Parser)
    served.add_serve_arguments(made["serve"])
    served.add_unload_arguments(made["unload"])
    made["auto"].add_argument("state", choices=["on", "off"])
    return parser


def _start(start: argparse.ArgumentParser) -> None:
    start.add_argument(
        "-n", dest="num_ranks", type=int, metavar="N",
        help="number of ranks; default: one per GPU, else one per two cores, at least 2",
    )  # fmt: skip
    start.add_argument("--keep", action="store_true", help="let the world outlive this notebook")
    start.add_argument("--timeout", type=float, default=120.0, metavar="S", help="default 120")
    start.add_argument("--mpi", metavar="PATH", help="the mpirun to use")
    start.add_argument("--threads", type=int, metavar="T", help="threads of each rank")
    start.add_argument(
        "--spares", type=int, default=0, metavar="K",
        help="processes that wait, torch imported, so that heal takes less than a second; "
        "default 0",
    )  # fmt: skip


def _ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-r", "--ranks", metavar="RANKS", help="such as 0,2:4 (2:4 is 2 and 3); default: all"
    )
