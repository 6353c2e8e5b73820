"""`%distributed checkpoints`: what a rank is told to run (client)."""

from __future__ import annotations

import argparse

__all__ = ["ACTIONS", "add_arguments", "shelf_cell"]

ACTIONS = {
    "list": "show step, when, size, loss, mesh, and when it was verified (the default)",
    "verify": "read one, or all, and compare with the checksums",
    "restore": "make the ranks' trainer go on from a step",
    "export": "write the weights as safetensors that transformers loads",
}


def add_arguments(
    parser: argparse.ArgumentParser, parser_class: type[argparse.ArgumentParser]
) -> None:
    """Give the parser of `%distributed checkpoints` its actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", parser_class=parser_class)
    made = {name: actions.add_parser(name, help=text, description=text.capitalize() + ".")
            for name, text in ACTIONS.items()}  # fmt: skip
    made["verify"].add_argument("step", nargs="?", type=int, help="default: all")
    made["restore"].add_argument("step", type=int)
    made["export"].add_argument("step", nargs="?", type=int, help="default: the newest")
    made["export"].add_argument("--to", dest="target", required=True, metavar="DIRECTORY")
    for name, place in {"": parser, **made}.items():
        place.add_argument(
            "--dir", dest="directory", metavar="DIRECTORY",
            default=argparse.SUPPRESS if name else None,
            help="of the checkpoints; default: that of the ranks' trainer",
        )  # fmt: skip


def shelf_cell(arguments: argparse.Namespace) -> tuple[str, bool]:
    """Return the cell that does what was asked, and whether all ranks must run it."""
    where = arguments.directory
    action = arguments.action or "list"
    call = {
        "list": lambda: f"table(globals(), {where!r})",
        "verify": lambda: f"verify_steps(globals(), {where!r}, {arguments.step!r})",
        "restore": lambda: f"restore_step(globals(), {where!r}, {arguments.step!r})",
        "export": lambda: (
            f"export_step(globals(), {where!r}, {arguments.step!r}, {arguments.target!r})"
        ),
    }[action]()
    # no import statement: it would leave a name among the user's
    source = f"print(__import__('nbdist.train.shelf', fromlist=['table']).{call})"
    return source, action == "restore"
