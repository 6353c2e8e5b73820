"""What threads of a cell write after its end, shown under that cell (client)."""

from __future__ import annotations

import collections
import contextvars
import json
import sys
import threading
from typing import Any

from nbdist.messages import CellEvent, Message, RankDisplay, RankStream
from nbdist.notebook.live import Publish

__all__ = ["LateOutput"]

MAX_CHARS = 100_000
MAX_CELLS = 100


class _Place:
    """Where a cell's output goes: the context of its execution holds the front end's request."""

    def __init__(self, context: contextvars.Context) -> None:
        self.context = context
        self.room = MAX_CHARS


class LateOutput:
    """Shows late events of the last 100 cells, at most 100,000 characters each.

    A front end shows output under the cell whose request it answers, also after the cell's end;
    a headless run of a notebook does not.

    Args:
        publish: shows a display.
    """

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._places: collections.OrderedDict[str, _Place] = collections.OrderedDict()
        self._lock = threading.Lock()

    def remember(self, cell_id: str) -> None:
        """Note that this cell's output belongs to what is executed now (main thread)."""
        with self._lock:
            self._places[cell_id] = _Place(contextvars.copy_context())
            while len(self._places) > MAX_CELLS:
                self._places.popitem(last=False)

    def take(self, rank: int, event: Message) -> None:
        """Show an event of a cell that has ended (link's thread)."""
        if not isinstance(event, CellEvent):
            return
        with self._lock:
            place = self._places.get(event.cell_id)
        if place is not None and place.room > 0:
            place.context.run(self._show, rank, event, place)

    def _show(self, rank: int, event: CellEvent, place: _Place) -> None:
        if isinstance(event, RankStream):
            place.room -= len(event.text)
            text = f"[{rank}] ...\n" if event.left_out else ""
            text += "".join(f"[{rank}] {line}\n" for line in event.text.splitlines())
            self._write(event.stream, rank, text, place)
        elif isinstance(event, RankDisplay) and event.action != "clear_output":
            place.room -= len(json.dumps(event.content))
            content: dict[str, Any] = dict(event.content)
            if display_id := content.get("transient", {}).get("display_id"):
                content["transient"] = {"display_id": f"{rank}-{display_id}"}
            self._publish(event.action, content, f"[{rank}]")

    def _write(self, stream: str, rank: int, text: str, place: _Place) -> None:
        target = sys.stderr if stream == "stderr" else sys.stdout
        target.write(text)
        if place.room <= 0:
            target.write(f"[{rank}] ... the rest is in `%distributed logs -r {rank}`\n")
        target.flush()
