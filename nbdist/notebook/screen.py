"""The last rows of a rank's text as a terminal shows them: carriage returns, cursor up (client)."""

from __future__ import annotations

import re

from nbdist.notebook.bars import parse

__all__ = ["Screen"]

MAX_ROWS = 50
_CONTROL = re.compile(r"(\n|\r|\x1b\[[0-9;?]*[A-Za-z])")
_CUT = re.compile(r"\x1b(\[[0-9;?]*)?$")
_COLOUR = "m"
_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"


class Screen:
    """Turns text with control characters into finished rows and rows that may still change.

    A row below which the cursor has gone is finished, unless it is a progress bar: programs that
    draw several bars go down and up again. Such a row is finished once an ordinary row follows,
    or once the cursor has stayed below for a moment (`settle`). A program that hides the cursor,
    as rich does, goes up and redraws: what stands above the place it goes to is finished.

    Text after a carriage return replaces the row. Colours are kept, other escapes dropped.
    """

    def __init__(self) -> None:
        self._rows = [""]
        self._at = 0
        self._replace = False
        self._pending = ""
        self._is_hidden = False
        self._is_redrawn = False

    @property
    def live(self) -> list[str]:
        """The rows that may still change, blank ones left out."""
        return [row for row in self._rows if row.strip()]

    @property
    def line(self) -> str:
        """The row that the cursor is in."""
        return self._rows[self._at]

    def feed(self, text: str) -> list[str]:
        """Take in text and return the rows that it finished."""
        done: list[str] = []
        text, self._pending = self._pending + text, ""
        if "\r" not in text and "\x1b" not in text and len(self._rows) == 1:
            # The common case, without looking at each character.
            text = self._feed_lines(text, done)
        if cut := _CUT.search(text):
            text, self._pending = text[: cut.start()], cut.group()
        for part in _CONTROL.split(text):
            if part == "\n":
                self._go_down(done)
            elif part == "\r":
                self._replace = True
            elif part.startswith("\x1b") and part[-1] != _COLOUR:
                self._escape(part)
            elif part:
                self._put(part, done)
        return done

    def settle(self) -> list[str]:
        """Finish the rows above the cursor, unless they are about to be redrawn."""
        return [] if self._is_hidden else self._finish_above()

    def end(self) -> list[str]:
        """Finish everything."""
        rows = self.live
        self.__init__()  # type: ignore[misc]
        return rows

    def _feed_lines(self, text: str, done: list[str]) -> str:
        """Finish whole lines; return what is left to look at closely."""
        if self._replace or parse(self._rows[0]):
            return text
        *lines, rest = (self._rows[0] + text).split("\n")
        for number, line in enumerate(lines):
            if parse(line):
                self._rows[0] = ""
                return "\n".join([*lines[number:], rest])
            done.append(line)
        if lines:
            self._rows[0] = ""
            return rest
        return text

    def _finish_above(self) -> list[str]:
        rows = [row for row in self._rows[: self._at] if row.strip()]
        del self._rows[: self._at]
        self._at = 0
        return rows

    def _put(self, text: str, done: list[str]) -> None:
        if self._is_redrawn:
            done += self._finish_above()
            self._is_redrawn = False
        self._rows[self._at] = text if self._replace else self._rows[self._at] + text
        self._replace = False

    def _escape(self, code: str) -> None:
        count = int(code[2:-1]) if code[2:-1].isdigit() else 1
        if code in (_HIDE, _SHOW):
            self._is_hidden = code == _HIDE
        elif code[-1] == "A":
            self._at = max(self._at - count, 0)
        elif code[-1] == "B":
            self._at = min(self._at + count, len(self._rows) - 1)
        elif code[-1] in "KJ":
            self._rows[self._at] = ""
            self._is_redrawn = self._is_hidden
            if code[-1] == "J":
                del self._rows[self._at + 1 :]
        while len(self._rows) > self._at + 1 and not self._rows[-1].strip():
            self._rows.pop()

    def _go_down(self, done: list[str]) -> None:
        row = self._rows[self._at]
        bar = parse(row)
        if bar is not None and bar.rest:
            # A line that was written while the bar stood there, such as a warning.
            done += [*self.settle(), bar.rest]
            self._rows[self._at] = bar.line
            self._replace = True
            return
        is_last = self._at == len(self._rows) - 1
        self._at += 1
        self._replace = not is_last
        if is_last:
            self._rows.append("")
        if self._is_hidden and self._at <= MAX_ROWS:
            return
        has_bars = any(parse(row) for row in self._rows[: self._at])
        if is_last and (not has_bars or (bar is None and row.strip()) or self._at > MAX_ROWS):
            done += self._rows[: self._at] if not has_bars else self.settle()
            if not has_bars:
                del self._rows[: self._at]
                self._at = 0
