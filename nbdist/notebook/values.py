"""`%distributed push` and `pull`: values between the notebook's names and the ranks' (client)."""

from __future__ import annotations

import argparse
from typing import Any

from IPython.core.error import UsageError

from nbdist.cluster.world import World

__all__ = ["pull", "push"]


def push(names: dict[str, Any], world: World, arguments: argparse.Namespace) -> None:
    """Copy names of the notebook to ranks."""
    if missing := [name for name in arguments.names if name not in names]:
        raise UsageError(
            f"%distributed push {' '.join(arguments.names)}: this notebook has no name "
            f"{missing[0]!r}; assign it first, in a cell without %%distributed"
        )
    world.push(arguments.ranks, **{name: names[name] for name in arguments.names})


def pull(names: dict[str, Any], world: World, arguments: argparse.Namespace) -> None:
    """Copy a name of the ranks into the notebook's, which are never overwritten unasked."""
    target = arguments.target or arguments.name
    if arguments.target is None and target in names:
        raise UsageError(
            f"%distributed pull {target}: this notebook has a name {target!r} of its own, "
            f"which is kept; say where to put the ranks' values: "
            f"`%distributed pull {target} --as {target}_by_rank`"
        )
    names[target] = world.pull(arguments.name, arguments.ranks)
