"""The ranks as a table, and the stages of a start (client)."""

from __future__ import annotations

import html
import sys
import time
from typing import Any

from nbdist.cluster.world import World
from nbdist.messages import RankInfo

__all__ = ["StageDisplay", "say", "show", "show_status"]

HEADINGS = ("rank", "host", "pid", "device", "memory", "state")


def _rows(infos: list[RankInfo], world: World) -> list[tuple[str, ...]]:
    rows = [
        (
            str(info.rank),
            info.host,
            str(info.pid),
            f"{info.device} ({info.device_name})" if info.device_name else info.device,
            f"{info.memory_bytes / 2**30:.1f} GiB",
            f"running {info.running_cell[:8]}" if info.running_cell else "idle",
        )
        for info in infos
    ]
    known = {info.rank for info in infos}
    for rank in sorted(set(range(world.num_ranks)) - known):
        state = "process gone" if rank in world.lost_ranks else "no answer"
        rows.append((str(rank), "", "", "", "", state))
    return sorted(rows, key=lambda row: int(row[0]))


def _bundle(title: str, rows: list[tuple[str, ...]]) -> dict[str, str]:
    widths = [max(len(row[i]) for row in [HEADINGS, *rows]) for i in range(len(HEADINGS))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in [HEADINGS, *rows]
    ]
    head = "".join(f"<th style='text-align:left'>{name}</th>" for name in HEADINGS)
    body = "".join(
        "<tr>"
        + "".join(f"<td style='text-align:left'>{html.escape(c)}</td>" for c in row)
        + "</tr>"
        for row in rows
    )
    table = f"<div>{html.escape(title)}</div><table><tr>{head}</tr>{body}</table>"
    return {"text/plain": "\n".join([title, *lines]), "text/html": table}


def say(text: str) -> None:
    """Write a line of answer to a command into the cell's output."""
    sys.stdout.write(text + "\n")


def show_status(shell: Any, world: World) -> None:
    """Show who the ranks are and what they run."""
    infos = world.status()
    show(shell, _bundle(_title(world, infos), _rows(infos, world)))


def _title(world: World, infos: list[RankInfo]) -> str:
    generation = max((info.generation for info in infos), default=0)
    title = f"world {world.world_id}: {world.num_ranks} ranks, process group {generation} verified"
    if wanted := world.record.settings["spares"]:
        title += f", {world.num_spares_ready} of {wanted} spare{'s' * (wanted > 1)} ready"
    return title


def show(shell: Any, bundle: dict[str, str], display_id: str = "", *, update: bool = False) -> None:
    """Show a mime bundle: in a notebook as it is, in a terminal its text."""
    if not hasattr(shell, "kernel"):
        # A terminal cannot rewrite what it has shown.
        say(bundle["text/plain"])
        return
    transient = {"display_id": display_id} if display_id else {}
    shell.display_pub.publish(bundle, {}, transient=transient, update=update)


class StageDisplay:
    """One line that says what a start is doing, replaced by the table of ranks."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._id = f"nbdist-start-{time.time_ns()}"
        self._started = time.monotonic()
        self._shown = False

    def stage(self, text: str) -> None:
        """Show what is being done now."""
        seconds = time.monotonic() - self._started
        line = f"{text} ... ({seconds:.1f} s)"
        bundle = {"text/plain": line, "text/html": f"<i>{html.escape(line)}</i>"}
        show(self._shell, bundle, self._id, update=self._shown)
        self._shown = True

    def done(self, world: World, what: str = "started") -> None:
        """Show the ranks."""
        seconds = time.monotonic() - self._started
        title = f"{_title(world, world.infos)}, {what} in {seconds:.1f} s"
        show(self._shell, _bundle(title, _rows(world.infos, world)), self._id, update=self._shown)
