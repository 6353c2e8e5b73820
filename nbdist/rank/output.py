"""Everything a cell writes on a rank, in order, as numbered events (rank).

Text of `sys.stdout` and `sys.stderr`, what C code and child processes write to the file
descriptors 1 and 2, and displays go through one `CellOutput`: pieces are joined for a few
milliseconds, kept whole in the rank's log file, and sent once, up to the cell's limit.
"""

from __future__ import annotations

import codecs
import collections
import fcntl
import io
import itertools
import operator
import os
import select
import struct
import termios
import threading
from pathlib import Path
from typing import Any, BinaryIO

from nbdist.messages import CellEvent, RankDisplay, RankStream
from nbdist.rank.budget import TextBudget
from nbdist.rank.link import RankLink
from nbdist.rank.log import RankLog

__all__ = ["CellOutput", "LinkStream", "FdCapture"]

FLUSH_SECONDS = 0.025
RETRY_SECONDS = 1.0
MAX_PIECE_CHARS = 1 << 18


class CellOutput:
    """Orders and numbers the output of a rank and hands it to the link.

    Safe to call from any thread. Text written after a cell has ended belongs to that cell.
    """

    def __init__(self, link: RankLink, log_path: Path) -> None:
        self._link = link
        self._lock = threading.RLock()
        self._pieces: collections.deque[tuple[str, str]] = collections.deque()
        self._num_chars = 0
        self._flush_is_due = False
        self._cell_id = ""
        self._seq = 0
        self._log = RankLog(log_path)
        self._budget = TextBudget(self._send_text)
        link.flush_with(self.flush)

    def begin(self, cell_id: str, text_limit: int) -> None:
        """Count events of this cell from 0 and its characters up to the limit."""
        with self._lock:
            self.flush()
            self._budget.release()
            self._cell_id, self._seq = cell_id, 0
            self._budget.reset(text_limit)

    def move_log(self, path: Path) -> None:
        """Keep what comes from now on in another log."""
        with self._lock:
            self.flush()
            self._log.move(path)

    def write(self, stream: str, text: str) -> None:
        """Add text of `stdout` or `stderr`."""
        # Called several times a `print`: no lock. What is appended before the flag is read is
        # taken by the flush that will clear it.
        self._pieces.append((stream, text))
        self._num_chars += len(text)
        if self._num_chars >= MAX_PIECE_CHARS:
            self.flush()
        elif not self._flush_is_due:
            self._flush_is_due = True
            self._link.flush_soon(FLUSH_SECONDS)

    def flush(self) -> None:
        """Send what was written so far, within the cell's limit."""
        with self._lock:
            self._flush_is_due = False
            self._num_chars = 0
            pieces = [self._pieces.popleft() for _ in range(len(self._pieces))]
            for stream, run in itertools.groupby(pieces, operator.itemgetter(0)):
                text = "".join(text for _, text in run)
                self._log.write(text)
                for start in range(0, len(text), MAX_PIECE_CHARS):
                    self._budget.add(stream, text[start : start + MAX_PIECE_CHARS])
            if pieces:
                self._log.flush()
            self._budget.try_release()
            if self._budget.holds_text:
                self._link.flush_soon(RETRY_SECONDS)

    def display(self, action: str, content: dict[str, Any]) -> None:
        """Send one display message, after the text before it."""
        self.event(RankDisplay, action=action, content=content)

    def event(self, kind: type[CellEvent], **values: Any) -> None:
        """Send an event of the cell with the next number, after the text before it."""
        with self._lock:
            self.flush()
            if kind is not RankDisplay:
                # The end of the text is what explains an error.
                self._budget.release()
            self._send(kind, **values)

    def _send_text(self, stream: str, text: str, left_out: int) -> None:
        self._send(RankStream, stream=stream, text=text, left_out=left_out)

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
        # No more than that: a child that goes on writing must not hold the cell up.
        waiting = fcntl.ioctl(self._read, termios.FIONREAD, b"\0" * 4)
        self._take(struct.unpack("i", waiting)[0])

    def _take(self, num_bytes: int) -> None:
        with self._lock:
            try:
                while num_bytes > 0 and (data := os.read(self._read, min(num_bytes, 1 << 16))):
                    num_bytes -= len(data)
                    self._output.write(self._name, self._decoder.decode(data))
            except BlockingIOError:
                return

    def _run(self) -> None:
        while True:
            select.select([self._read], [], [])
            self._take(1 << 16)
