"""The log of a rank's collective calls, in a file that its peers can read (rank).

Each rank maps one file, a table of fixed-size records. A call of group G with number N lies in slot
(G + N) modulo the size, so that a peer finds the call that must match its own without a search,
and what a rank did last can still be read when its process is gone.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Call", "CallLog", "ANY", "NUM_SLOTS"]

ANY = -1
"""Stands for "not known, or need not be equal" in `numel`, `root` and `reduction`."""

NUM_SLOTS = 2048
MAX_DIMS = 4

# group, number | what must match | where, when, shape
_MATCH = struct.Struct("<HHhxxqi")
_BODY = struct.Struct("<QQ" + _MATCH.format[1:] + "xxxxIIdB7x" + f"{MAX_DIMS}q")
_CRC = struct.Struct("<I")
_LEFT = _BODY.size + _CRC.size
_SIZE = (_LEFT + 1 + 15) // 16 * 16
_KEY = struct.Struct("<QQ")
_READ_TRIES = 100


@dataclass(slots=True)
class Call:
    """One call of a collective on one rank.

    Attributes:
        group: id of the group, equal on all its ranks and unlike any other group's.
        number: counts the calls of the group from 1.
        op: index of the operation's name.
        dtype: index of the element type; 0 for none.
        reduction: code of the reduction, or ANY.
        numel: number of elements that all ranks must agree on, or ANY.
        root: global rank of the source or destination, or ANY.
        cell: number of the notebook cell that called; 0 when no cell did.
        line: line in that cell, counted from 1.
        entered_at: seconds since the epoch.
        shape: of the tensor; the first four dimensions.
        left: the call has returned or raised.
    """

    group: int
    number: int
    op: int
    dtype: int = 0
    reduction: int = ANY
    numel: int = ANY
    root: int = ANY
    cell: int = 0
    line: int = 0
    entered_at: float = 0.0
    shape: tuple[int, ...] = ()
    left: bool = False

    def matches(self, other: Call) -> bool:
        """Return whether two ranks may make these calls as one collective."""
        if self.op != other.op or (self.dtype != other.dtype and self.dtype and other.dtype):
            return False
        pairs = (
            (self.reduction, other.reduction),
            (self.numel, other.numel),
            (self.root, other.root),
        )
        return all(mine == theirs or ANY in (mine, theirs) for mine, theirs in pairs)


class CallLog:
    """The table of one rank, mapped from its file.

    Records are checked by a checksum: one that is being written reads as absent. A writer stores
    its record before it reads those of its peers; whoever comes last therefore sees all.

    Args:
        path: the file; the rank that writes it makes it, the others read it.
        writable: make the file, empty.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            if writable:
                os.ftruncate(fd, NUM_SLOTS * _SIZE)
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._map = mmap.mmap(fd, NUM_SLOTS * _SIZE, access=access)
        finally:
            os.close(fd)
        if writable:
            # In place: a peer may have mapped what an earlier process of this rank wrote.
            self._map[:] = bytes(NUM_SLOTS * _SIZE)

    def write(self, call: Call) -> None:
        """Store a call."""
        dims = (*call.shape[:MAX_DIMS], *(0,) * (MAX_DIMS - len(call.shape)))
        body = _BODY.pack(
            call.group,
            call.number,
            call.op,
            call.dtype,
            call.reduction,
            call.numel,
            call.root,
            call.cell,
            call.line,
            call.entered_at,
            min(len(call.shape), 255),
            *dims,
        )
        at = _slot(call.group, call.number)
        self._map[at : at + _LEFT + 1] = body + _CRC.pack(zlib.crc32(body)) + b"\0"

    def mark_left(self, call: Call) -> None:
        """Note that a call has ended, unless its slot holds another one by now."""
        at = _slot(call.group, call.number)
        if self._map[at : at + _KEY.size] == _KEY.pack(call.group, call.number):
            self._map[at + _LEFT] = 1

    def read(self, group: int, number: int) -> Call | None:
        """Return a call, or None when this rank has not made it (or long ago)."""
        at = _slot(group, number)
        key = _KEY.pack(group, number)
        for _ in range(_READ_TRIES):
            if self._map[at : at + _KEY.size] != key:
                return None
            call = self._decode(at)
            if call is not None:
                return call
        return None

    def last(self, count: int) -> list[Call]:
        """Return the newest calls of this rank, newest last."""
        calls = [self._decode(at) for at in range(0, NUM_SLOTS * _SIZE, _SIZE)]
        known = [call for call in calls if call is not None]
        return sorted(known, key=lambda call: call.entered_at)[-count:]

    def _decode(self, at: int) -> Call | None:
        raw = self._map[at : at + _LEFT + 1]
        body = raw[: _BODY.size]
        (group, number, op, dtype, reduction, numel, root, cell, line, entered_at, num_dims,
         *dims) = _BODY.unpack(body)  # fmt: skip
        if not number or _CRC.unpack_from(raw, _BODY.size)[0] != zlib.crc32(body):
            return None
        return Call(
            group=group,
            number=number,
            op=op,
            dtype=dtype,
            reduction=reduction,
            numel=numel,
            root=root,
            cell=cell,
            line=line,
            entered_at=entered_at,
            shape=tuple(dims[:num_dims]),
            left=bool(raw[_LEFT]),
        )

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()


def _slot(group: int, number: int) -> int:
    return (group + number) % NUM_SLOTS * _SIZE
