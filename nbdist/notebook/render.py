"""Shows a cell's events under the cell while they come (client)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from nbdist.messages import CellNote, Message, RankDisplay, RankDone, RankStream
from nbdist.notebook.fold import Folder, Piece, span

__all__ = ["CellView"]

PARTIAL_SECONDS = 0.3
MAX_CHARS = 1_000_000


class CellView:
    """What one cell shows: text as streams, displays as displays, each under its ranks.

    A line that a rank has not ended yet (a progress bar, `print(..., end="")`) is shown after a
    moment and rewritten in place while it changes.

    Args:
        ranks: that run the cell.
        publish: shows a display; called with action, content, and the label of its ranks.
        quiet: show nothing unless the cell fails.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        publish: Callable[[str, dict[str, Any], str], None],
        *,
        quiet: bool = False,
    ) -> None:
        self._folder = Folder(ranks, self._show)
        self._publish = publish
        self._quiet = quiet
        self._held: list[tuple[tuple[int, ...], Piece]] = []
        self._partial: dict[tuple[int, str], str] = {}
        self._changed_at: dict[tuple[int, str], float] = {}
        self._open = {"stdout": "", "stderr": ""}
        self._num_chars = 0
        self._has_note = False

    def take(self, event: Message | None) -> None:
        """Show an event, or let time pass."""
        if isinstance(event, RankStream):
            self._take_text(event.rank, event.stream, event.text)
        elif isinstance(event, RankDisplay):
            self._take_display(event)
        elif isinstance(event, RankDone):
            self._end_lines(event.rank)
            self._folder.end(event.rank)
        elif isinstance(event, CellNote):
            self._show_note(event)
        else:
            self._show_partials()
        self._folder.release()

    def catch_up(self, rank: int) -> None:
        """Show all that is held back now: the user is asked, and what this rank wrote matters."""
        self._end_lines(rank)
        self._folder.release(everything=True)
        self._close_lines()
        sys.stdout.flush()
        sys.stderr.flush()

    def finish(self, *, failed: bool) -> None:
        """Show all that is still held back."""
        for rank, _ in list(self._partial):
            self._end_lines(rank)
        self._folder.release(everything=True)
        self._close_lines()
        if failed and self._quiet:
            self._quiet = False
            for ranks, piece in self._held:
                self._show(ranks, piece)
        self._held.clear()
        sys.stdout.flush()
        sys.stderr.flush()

    def _take_text(self, rank: int, stream: str, text: str) -> None:
        key = (rank, stream)
        *lines, rest = (self._partial.pop(key, "") + text).split("\n")
        for line in lines:
            self._folder.add(rank, Piece(stream, _last_state(line)))
        if rest:
            self._partial[key] = rest if rest.endswith("\r") else _last_state(rest, "\r")
            self._changed_at.setdefault(key, time.monotonic())

    def _take_display(self, event: RankDisplay) -> None:
        self._end_lines(event.rank)
        data = event.content.get("data", {})
        if event.action == "execute_result" and set(data) == {"text/plain"}:
            for line in data["text/plain"].split("\n"):
                self._folder.add(event.rank, Piece("stdout", line))
            return
        content = {"action": event.action, **event.content}
        if display_id := event.content.get("transient", {}).get("display_id"):
            content["transient"] = {"display_id": f"{event.rank}-{display_id}"}
        content.pop("execution_count", None)
        # A widget's model lives on the rank: show what stands beside the view.
        data.pop("application/vnd.jupyter.widget-view+json", None)
        text = json.dumps(content, sort_keys=True)
        self._folder.add(event.rank, Piece("display", text, content))

    def _show_note(self, note: CellNote) -> None:
        """Show a remark about the cell in one place, each instead of the one before."""
        self._close_lines()
        content = {"data": {"text/plain": note.text}, "metadata": {}}
        content["transient"] = {"display_id": f"note-{note.cell_id}"}
        self._publish("update_display_data" if self._has_note else "display_data", content, "")
        self._has_note = True

    def _end_lines(self, rank: int) -> None:
        for key in [key for key in self._partial if key[0] == rank]:
            self._folder.add(rank, Piece(key[1], _last_state(self._partial.pop(key))))
            self._changed_at.pop(key, None)

    def _show(self, ranks: tuple[int, ...], piece: Piece) -> None:
        if self._quiet:
            self._held.append((ranks, piece))
            return
        label = f"[{span(ranks)}]"
        if piece.stream == "display":
            self._close_lines()
            content = dict(piece.content)
            self._publish(content.pop("action"), content, label)
        else:
            self._write(piece.stream, f"{label} {piece.text}", "\n")

    def _show_partials(self) -> None:
        """Show unfinished lines that have stood for a moment, the newest state of each."""
        now = time.monotonic()
        for key, changed_at in list(self._changed_at.items()):
            if now - changed_at >= PARTIAL_SECONDS and not self._quiet:
                self._changed_at.pop(key)
                rank, stream = key
                self._write(stream, f"[{rank}] {_last_state(self._partial.get(key, ''))}", "")

    def _write(self, stream: str, text: str, end: str) -> None:
        target = sys.stderr if stream == "stderr" else sys.stdout
        if self._num_chars > MAX_CHARS:
            return
        self._num_chars += len(text) + 1
        if self._num_chars > MAX_CHARS:
            text, end = "... the rest is in the ranks' logs: `%distributed logs -r 0`", "\n"
        if self._open[stream]:
            # Overwrite the unfinished line that stands there, with spaces where it was longer.
            text = "\r" + text.ljust(len(self._open[stream]))
        self._open[stream] = "" if end else text.strip("\r")
        target.write(text + end)
        if not end:
            target.flush()

    def _close_lines(self) -> None:
        for stream, text in self._open.items():
            if text:
                self._open[stream] = ""
                getattr(sys, stream).write("\n")


def _last_state(line: str, keep: str = "") -> str:
    """Return what a terminal shows of a line that was rewritten with carriage returns."""
    line = line.rstrip("\r")
    return keep + line.rpartition("\r")[2] if "\r" in line else line
