"""Everything a cell writes on a rank, in order, as numbered events (rank).

Text of `sys.stdout` and `sys.stderr`, what C code and child processes write to the file
descriptors 1 and 2, and displays go through one `CellOutput`: pieces are joined for a few
milliseconds, sent once, and kept whole in the rank's log file.
"""

from __future__ import annotations

import codecs
import faulthandler
import fcntl
import io
import os
import select
import struct
import termios
import threading
from pathlib import Path
from typing import Any, BinaryIO

from nbdist.messages import CellEvent, RankDisplay, RankStream
from nbdist.rank.link import RankLink

__all__ = ["CellOutput", "LinkStream", "FdCapture"]

FLUSH_SECONDS = 0.025
MAX_PIECE_CHARS = 1 << 18


class CellOutput:
    """Orders and numbers the output of a rank and hands it to the link.

    Safe to call from any thread. Text written after a cell has ended belongs to that cell.
    """

    def __init__(self, link: RankLink, log_path: Path) -> None:
        self._link = link
        self._lock = threading.RLock()
        self._pieces: list[tuple[str, str]] = []
        self._num_chars = 0
        self._cell_id = ""
        self._seq = 0
        self._log = log_path.open("a", encoding="utf-8", errors="backslashreplace")
        # When native code crashes, the log gets the Python stack; nobody is left to send it.
        faulthandler.enable(self._log)
        link.flush_with(self.flush)

    def begin(self, cell_id: str) -> None:
        """Count events of this cell from 0."""
        with self._lock:
            self.flush()
            self._cell_id, self._seq = cell_id, 0

    def write(self, stream: str, text: str) -> None:
        """Add text of `stdout` or `stderr`."""
        if not text:
            return
        with self._lock:
            if self._pieces and self._pieces[-1][0] == stream:
                self._pieces[-1] = (stream, self._pieces[-1][1] + text)
            else:
                self._pieces.append((stream, text))
            self._num_chars += len(text)
            if self._num_chars >= MAX_PIECE_CHARS:
                self.flush()
            else:
                self._link.flush_soon(FLUSH_SECONDS)

    def flush(self) -> None:
        """Send what was written so far."""
        with self._lock:
            pieces, self._pieces, self._num_chars = self._pieces, [], 0
            for stream, text in pieces:
                self._log.write(text)
                self._send(RankStream, stream=stream, text=text)
            if pieces:
                self._log.flush()

    def display(self, action: str, content: dict[str, Any]) -> None:
        """Send one display message, after the text before it."""
        self.event(RankDisplay, action=action, content=content)

    def event(self, kind: type[CellEvent], **values: Any) -> None:
        """Send an event of the cell with the next number, after the text before it."""
        with self._lock:
            self.flush()
            self._send(kind, **values)

    def _send(self, kind: type[CellEvent], **values: Any) -> None:
        message = kind(rank=self._link.rank, cell_id=self._cell_id, seq=self._seq, **values)
        self._seq += 1
        self._link.emit(message)


class LinkStream(io.TextIOBase):
    """`sys.stdout` or `sys.stderr` of a rank."""

    encoding = "utf-8"
    errors = "strict"

    def __init__(self, output: CellOutput, name: str, fd: int) -> None:
        super().__init__()
        self.name = f"<{name}>"
        self._output = output
        self._stream = name
        self._fd = fd
        self.buffer: BinaryIO = os.fdopen(os.dup(fd), "wb", buffering=0)

    def write(self, text: str) -> int:
        """Hand text to the cell's output."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._output.write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: text leaves within milliseconds; a flush a print would cost a message."""

    def fileno(self) -> int:
        """Return the file descriptor, so that child processes can write to it."""
        return self._fd

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return False: nobody types at a rank."""
        return False


class FdCapture:
    """Catches what is written to a file descriptor below Python.

    `original` stays open on what the descriptor was before.
    """

    def __init__(self, output: CellOutput, name: str, fd: int) -> None:
        self._output = output
        self._name = name
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._lock = threading.Lock()
        self.original = os.dup(fd)
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        os.dup2(write, fd)
        os.close(write)
        thread = threading.Thread(target=self._run, name=f"nbdist-{name}", daemon=True)
        thread.start()

    def drain(self) -> None:
        """Hand over what has been written to the descriptor until now."""
        waiting = fcntl.ioctl(self._read, termios.FIONREAD, b"\0" * 4)
        if struct.unpack("i", waiting)[0]:
            self._take()

    def _take(self) -> None:
        with self._lock:
            try:
                while data := os.read(self._read, 1 << 16):
                    self._output.write(self._name, self._decoder.decode(data))
            except BlockingIOError:
                return

    def _run(self) -> None:
        while True:
            select.select([self._read], [], [])
            self._take()
