"""Shows a cell's events under the cell while they come (client)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from nbdist.messages import (
    CellEvent,
    CellNote,
    Message,
    RankDisplay,
    RankDone,
    RanksChanged,
    RankStream,
)
from nbdist.notebook.bars import parse
from nbdist.notebook.board import Board
from nbdist.notebook.fold import Folder, Piece, span
from nbdist.notebook.live import LiveText, Publish
from nbdist.notebook.outlet import Outlet
from nbdist.notebook.screen import Screen

__all__ = ["CellView"]

PARTIAL_SECONDS = 0.3
SETTLE_SECONDS = 0.1
STATUS_SECONDS = 2.0


class CellView:
    """What one cell shows: text as streams, displays as displays, each under its ranks.

    A line that a rank has not ended yet (`print(..., end="")`) is shown after a moment and
    rewritten in place while it changes. Progress bars of the same name are one line in a place of
    its own. So is the note about the cell, which says where a cell without output is.

    Args:
        ranks: that run the cell.
        publish: shows a display; called with action, content, and the label of its ranks.
        quiet: show nothing unless the cell fails.
        live: displays can be updated; in a terminal they cannot.

    Attributes:
        on_first_event: called once with the id of the cell.
    """

    def __init__(
        self, ranks: tuple[int, ...], publish: Publish, *, quiet: bool = False, live: bool = True
    ) -> None:
        self.on_first_event: Callable[[str], None] | None = None
        self._publish = publish
        self._quiet = quiet
        self._live = live
        self._be_of(ranks)
        self._bars = LiveText(self._place, PARTIAL_SECONDS)
        self._note = LiveText(self._place, 0.0)
        self._note_is_status = True
        self._held: list[tuple[tuple[int, ...], Piece]] = []
        self._screens: dict[tuple[int, str], Screen] = {}
        self._moved_at: dict[tuple[int, str], float] = {}
        self._partial_at: dict[tuple[int, str], float] = {}
        self._active_at = time.monotonic()
        self._seconds = 0.0
        self._status_after = float(os.environ.get("NBDIST_STATUS_SECONDS", STATUS_SECONDS))

    def _be_of(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._folder = Folder(ranks, self._show)
        self._board = Board(ranks)
        self._outlet = Outlet(ranks, LiveText(self._place, 1.0) if self._live else None)

    def take(self, event: Message | None) -> None:
        """Show an event, or let time pass."""
        if isinstance(event, CellEvent) and self.on_first_event is not None:
            self.on_first_event(event.cell_id)
            self.on_first_event = None
        if isinstance(event, RankStream):
            self._take_text(event)
        elif isinstance(event, RankDisplay):
            self._take_display(event)
        elif isinstance(event, RankDone):
            self._take_done(event)
        elif isinstance(event, CellNote):
            self._take_note(event)
        elif isinstance(event, RanksChanged):
            self._change_ranks(event.ranks)
        self._let_time_pass()
        self._folder.release()
        self._outlet.flush()

    def catch_up(self, rank: int) -> None:
        """Show all that is held back now: the user is asked, and what this rank wrote matters."""
        self._end_rows(rank)
        self._folder.release(everything=True)
        self._outlet.close_lines()
        self._outlet.flush()
        sys.stdout.flush()
        sys.stderr.flush()

    def finish(self, *, failed: bool) -> None:
        """Show all that is still held back, and leave nothing that says the cell runs."""
        for rank in self._ranks:
            self._end_rows(rank)
            self._board.end_rank(rank)
        self._folder.release(everything=True)
        self._show_bars(force=True)
        if failed and self._quiet:
            self._quiet = False
            for ranks, piece in self._held:
                self._show(ranks, piece)
        self._held.clear()
        self._outlet.close_lines()
        self._outlet.flush()
        self._outlet.show_tail(force=True)
        if self._note.text is not None and self._live and (self._note_is_status or not failed):
            who = f"rank{'s' * (len(self._ranks) > 1)} {span(self._ranks)}"
            self._note.show(f"{who}: {self._seconds:.1f} s", force=True)
        sys.stdout.flush()
        sys.stderr.flush()

    def _take_text(self, event: RankStream) -> None:
        rank, key = event.rank, (event.rank, event.stream)
        self._active_at = time.monotonic()
        screen = self._screens.setdefault(key, Screen())
        if event.left_out:
            self._add_rows(rank, event.stream, screen.end())
            self._outlet.leave_out(rank, event.left_out)
        self._add_rows(rank, event.stream, screen.feed(event.text))
        live = screen.live
        bars = [bar for row in live if (bar := parse(row)) is not None]
        self._board.draw(rank, event.stream, bars)
        self._moved_at[key] = self._active_at
        if live and not bars:
            self._partial_at.setdefault(key, self._active_at)

    def _add_rows(self, rank: int, stream: str, rows: list[str]) -> None:
        for row in rows:
            bar = parse(row)
            if bar is None:
                self._folder.add(rank, Piece(stream, row))
                continue
            bar_key = self._board.end_bar(rank, stream, bar)
            self._folder.add(rank, Piece(stream, f"bar {bar_key}", bar_key))
            if bar.rest:
                self._folder.add(rank, Piece(stream, bar.rest))

    def _take_display(self, event: RankDisplay) -> None:
        self._active_at = time.monotonic()
        self._end_rows(event.rank)
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

    def _take_done(self, event: RankDone) -> None:
        self._seconds = max(self._seconds, event.seconds)
        self._end_rows(event.rank)
        self._board.end_rank(event.rank)
        self._folder.end(event.rank)

    def _take_note(self, note: CellNote) -> None:
        """Show a remark about the cell in one place, each instead of the one before."""
        if note.ranks:
            self._outlet.write_line("stderr", note.ranks, note.text)
            return
        if note.is_status:
            is_silent = time.monotonic() - self._active_at >= self._status_after > 0
            if self._quiet or not self._live or not (is_silent or self._note.text is not None):
                return
        self._note_is_status = note.is_status
        self._note.show(note.text, force=True)

    def _change_ranks(self, ranks: tuple[int, ...]) -> None:
        """Show what is held back, and go on with other ranks."""
        for rank in self._ranks:
            self._end_rows(rank)
        self._folder.release(everything=True)
        self._show_bars(force=True)
        self._outlet.close_lines()
        self._outlet.flush()
        self._outlet.show_tail(force=True)
        self._be_of(ranks)

    def _end_rows(self, rank: int) -> None:
        for key, screen in self._screens.items():
            if key[0] == rank:
                self._add_rows(rank, key[1], screen.end())
                self._board.draw(rank, key[1], [])
                self._partial_at.pop(key, None)

    def _show(self, ranks: tuple[int, ...], piece: Piece) -> None:
        if self._quiet:
            self._held.append((ranks, piece))
        elif piece.stream == "display":
            content = dict(piece.content)
            action = content.pop("action")
            if action == "clear_output":
                self._bars.forget()
                self._note.forget()
            self._place(action, content, f"[{span(ranks)}]")
        elif piece.content is None:
            self._outlet.write_line(piece.stream, ranks, piece.text)
        elif (line := self._board.take_ended(piece.content, ranks)) is not None:
            self._outlet.write_line(piece.stream, ranks, line)

    def _let_time_pass(self) -> None:
        now = time.monotonic()
        for key, moved_at in list(self._moved_at.items()):
            if now - moved_at >= SETTLE_SECONDS:
                del self._moved_at[key]
                self._add_rows(*key, self._screens[key].settle())
        for key, since in list(self._partial_at.items()):
            if now - since >= PARTIAL_SECONDS and not self._quiet:
                del self._partial_at[key]
                line = self._screens[key].line
                if line.strip() and parse(line) is None:
                    self._outlet.write_open(key[1], key[:1], line)
        self._show_bars()
        self._outlet.show_tail()

    def _show_bars(self, *, force: bool = False) -> None:
        lines = [] if self._quiet else self._board.lines()
        if not lines and self._bars.text is None:
            return
        is_over = force or not self._board.is_going
        if self._live:
            text = "\n".join(f"[{span(ranks)}] {text}" for ranks, text in lines)
            self._bars.show(text, force=is_over)
        elif is_over:
            for ranks, text in lines:
                self._outlet.write_line("stderr", ranks, text)
        elif lines:
            self._outlet.write_open("stderr", *lines[-1])
        if is_over:
            self._board.close()
            if lines:
                self._bars.forget()

    def _place(self, action: str, content: dict[str, Any], label: str) -> None:
        """Show a display after the text before it."""
        self._outlet.close_lines()
        self._outlet.flush()
        self._publish(action, content, label)
