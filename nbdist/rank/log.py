"""A rank's log file: everything its cells wrote, whole, up to a bound on disk (rank)."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

__all__ = ["RankLog", "log_path"]

MAX_LOG_CHARS = 256 << 20


def log_path(directory: Path, rank: int) -> Path:
    """Return where a rank of the world in `directory` writes its log."""
    return directory / "logs" / f"rank-{rank}.log"


class RankLog:
    """Appends text; after `MAX_LOG_CHARS` the file becomes `NAME.1` and a new one begins.

    So a log holds at least the last 256 Mi characters and at most twice as many.

    Args:
        path: of the file.
        on_open: is given each file. When native code crashes, the log gets the Python stack;
            nobody is left to send it.
    """

    def __init__(self, path: Path, on_open: Callable[[TextIO], None] = faulthandler.enable) -> None:
        self._path = path
        self._on_open = on_open
        self._num_chars = 0
        self._open()

    def move(self, path: Path) -> None:
        """Append to another file from now on."""
        old, self._path = self._file, path
        self._open()
        old.close()

    def write(self, text: str) -> None:
        """Append text."""
        if self._num_chars > MAX_LOG_CHARS:
            old = self._file
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._open()
            old.close()
            self._num_chars = 0
        self._num_chars += len(text)
        self._file.write(text)

    def flush(self) -> None:
        """Let readers see what was written."""
        self._file.flush()

    def _open(self) -> None:
        self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace")
        self._on_open(self._file)

    def close(self) -> None:
        """Write no more."""
        self._file.close()
