"""What a notebook shows of another number of ranks (client)."""

from __future__ import annotations

from typing import Any

from nbdist.cluster.resizing import Resized
from nbdist.cluster.world import World
from nbdist.errors import RankBusyError
from nbdist.notebook.healed import joined
from nbdist.notebook.tables import StageDisplay, say

__all__ = ["resize", "summary"]


def resize(shell: Any, world: World, num_ranks: int) -> None:
    """Change the number of ranks; show the stages, the ranks, and what became of trainers."""
    display = StageDisplay(shell)
    try:
        resized = world.resize(num_ranks, display.stage)
    except RankBusyError:
        world.ask_resize(num_ranks)
        say(
            f"a cell runs: its notebook has been asked for {num_ranks} ranks, and says under that "
            "cell what comes of it; then `%distributed attach` here"
        )
        return
    if resized is None:
        say(f"world {world.world_id} has {num_ranks} ranks; nothing was done")
        return
    display.done(world, f"{resized.before} ranks made {resized.after}")
    say(summary(resized))


def summary(resized: Resized) -> str:
    """Return in words what became of ranks, names and trainers."""
    places = resized.places
    lines = [f"rank {old} is rank {new} now" for old, new in sorted(places.moves.items())]
    if places.leaving:
        lines.append(f"rank {_numbers(places.leaving)} has ended; its variables are gone with it")
    if places.new:
        text = f"rank {_numbers(places.new)} is new and has copies of the others' names"
        lines.append(text + (f", but not: {joined(resized.missing)}" if resized.missing else ""))
    for name, source in sorted(resized.trainers.items()):
        lines.append(
            f"`{name}` is on the new mesh, its state from {source}: `{name}.fit()` goes on"
        )
    for name, why in sorted(resized.behind.items()):
        lines.append(f"`{name}` is still on the old process group and must be built again: {why}")
    lines.append("other objects that were built over the old process group must be built again")
    return "\n".join(lines)


def _numbers(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
