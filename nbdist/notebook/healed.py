"""What a notebook shows of replaced ranks (client)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from nbdist.cluster.healing import Healed
from nbdist.cluster.incidents import Incident
from nbdist.cluster.world import World
from nbdist.notebook.tables import StageDisplay, say

__all__ = ["incident_list", "joined", "replace_ranks", "summary"]

MAX_NAMES = 8


def replace_ranks(
    shell: Any, world: World, replace: Callable[[Callable[[str], None]], list[int]]
) -> None:
    """Replace ranks and show the stages, the ranks, and which names are back and which gone.

    `replace` is `World.heal`, or `World.restart` with its ranks; it is given what shows a stage.
    """
    display = StageDisplay(shell)
    ranks = replace(display.stage)
    if not ranks:
        say(f"no rank of world {world.world_id} is lost; nothing was done")
        return
    display.done(world, f"rank {', '.join(map(str, ranks))} replaced")
    assert world.last_heal is not None, "ranks were replaced"
    say(summary(world.last_heal))


def summary(healed: Healed) -> str:
    """Return in words what became of the names of the replaced ranks."""
    lines = [f"rank {rank} had died: {how}" for rank, how in sorted(healed.deaths.items())]
    for text, by_rank in (
        ("pushed again to", healed.pushed),
        ("gone, while another rank has them, on", healed.gone or {}),
    ):
        for rank, names in sorted(by_rank.items()):
            if names:
                lines.append(f"{text} rank {rank}: {joined(names)}")
    if healed.gone is None:
        lines.append("all ranks are new: what was not pushed again is gone")
    lines.append("objects that were built over the old process group must be built again")
    return "\n".join(lines)


def incident_list(incidents: list[Incident]) -> str:
    """Return the log of a world as text, a line each."""
    if not incidents:
        return (
            "no rank has died in a cell that survives that; "
            'TrainConfig(on_failure="heal") makes fit() such a cell'
        )
    return "\n".join(
        f"{time.strftime('%H:%M:%S', time.localtime(one.at))}  {one.in_words()}"
        for one in incidents
    )


def joined(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
