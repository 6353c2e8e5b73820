"""Writes labelled text under the cell, within a bound for each rank (client)."""

from __future__ import annotations

import collections
import sys
from collections.abc import Sequence

from nbdist.notebook.fold import span
from nbdist.notebook.live import LiveText

__all__ = ["Outlet"]

MAX_CHARS = 1_000_000
MAX_OPEN_CHARS = 200_000
TAIL_LINES = 5
TAIL_WIDTH = 200


class Outlet:
    """The text of a cell. Lines are joined until `flush`.

    Each rank may fill its part of `MAX_CHARS`. Of what it writes beyond that the last lines are
    shown, in one place, and the rest counted.

    Args:
        ranks: that run the cell.
        tail: the place of the last lines; None where nothing can be updated.
    """

    def __init__(self, ranks: Sequence[int], tail: LiveText | None) -> None:
        self._room = dict.fromkeys(ranks, MAX_CHARS // max(len(ranks), 1))
        self._open_room = MAX_OPEN_CHARS
        self._left_out: dict[int, int] = {}
        self._last: dict[int, collections.deque[str]] = {}
        self._tail = tail
        self._open = {"stdout": "", "stderr": ""}
        self._batch: list[tuple[str, str]] = []

    def write_line(self, stream: str, ranks: Sequence[int], text: str) -> None:
        """Write a whole line under its ranks."""
        if not any(self._room[rank] > 0 for rank in ranks):
            for rank in ranks:
                self.leave_out(rank, len(text) + 1)
                self._last[rank].append(text)
            return
        for rank in ranks:
            self._room[rank] -= (len(text) + 1) // len(ranks)
        self._put(stream, f"[{span(ranks)}] {text}", "\n")

    def write_open(self, stream: str, ranks: Sequence[int], text: str) -> None:
        """Write a line that is not ended yet; the next one of the stream replaces it."""
        text = f"[{span(ranks)}] {text}"
        self._open_room -= len(text)
        if self._open_room > 0 and any(self._room[rank] > 0 for rank in ranks):
            self._put(stream, text, "")

    def leave_out(self, rank: int, num_chars: int) -> None:
        """Count text of a rank that is not shown."""
        if rank not in self._left_out:
            self._left_out[rank] = 0
            self._last[rank] = collections.deque(maxlen=TAIL_LINES)
        self._left_out[rank] += num_chars

    def close_lines(self) -> None:
        """End the lines that are open, so that something else can follow."""
        for stream, text in self._open.items():
            if text:
                self._open[stream] = ""
                self._batch.append((stream, "\n"))

    def flush(self) -> None:
        """Hand what was written to the front end."""
        batch, self._batch = self._batch, []
        texts: list[str] = []
        for number, (stream, text) in enumerate(batch):
            texts.append(text)
            if number + 1 == len(batch) or batch[number + 1][0] != stream:
                (sys.stderr if stream == "stderr" else sys.stdout).write("".join(texts))
                texts.clear()

    def show_tail(self, *, force: bool = False) -> None:
        """Show the last lines of the ranks that wrote more than there is room for."""
        if not self._left_out or not (force or (self._tail is not None and self._tail.is_due)):
            return
        lines = []
        for rank, num_chars in sorted(self._left_out.items()):
            last = self._last[rank]
            what = "; its last lines:" if last else ""
            lines.append(
                f"[{rank}] ... {num_chars:,} characters are not shown, "
                f"`%distributed logs -r {rank}` has them{what}"
            )
            lines += [f"[{rank}] {line[:TAIL_WIDTH]}" for line in last]
        self.close_lines()
        if self._tail is None:
            self._batch.append(("stdout", "\n".join(lines) + "\n"))
            self.flush()
            return
        self.flush()
        self._tail.show("\n".join(lines), force=force)

    def _put(self, stream: str, text: str, end: str) -> None:
        if self._open[stream]:
            # Overwrite the unfinished line that stands there, with spaces where it was longer.
            text = "\r" + text.ljust(len(self._open[stream]))
        self._open[stream] = "" if end else text.strip("\r")
        self._batch.append((stream, text + end))
