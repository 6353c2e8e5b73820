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
from pathlib import Path
from typing import NamedTuple, Self

__all__ = ["Call", "CallLog", "What", "pack_head", "ANY", "NUM_SLOTS"]

ANY = -1
"""Stands for "not known, or need not be equal" in `numel`, `root` and `reduction`."""

NUM_SLOTS = 2048
MAX_DIMS = 4

# group, number, op, dtype, reduction, numel, root | cell, line, dimensions, shape
_HEAD = struct.Struct("<QQHHhxxqi")
_TAIL = struct.Struct(f"<IIB7x{MAX_DIMS}q")
_CRC = struct.Struct("<I")
_BODY = _HEAD.size + _TAIL.size
_USED = _BODY + _CRC.size
_SIZE = (_USED + 15) // 16 * 16
_KEY = struct.Struct("<QQ")
_READ_TRIES = 100
_NO_DIMS = (0,) * MAX_DIMS

pack_head = _HEAD.pack
"""Makes a `Call.head` from the arguments of `Call.of`, in their order up to `root`."""


class Call(NamedTuple):
    """One call of a collective on one rank.

    Attributes:
        head: what is compared, packed: equal heads are calls that match.
        cell: number of the notebook cell that called; 0 when no cell did.
        line: line in that cell, counted from 1.
        shape: of the tensor; the first four dimensions.
    """

    head: bytes
    cell: int
    line: int
    shape: tuple[int, ...]

    @classmethod
    def of(
        cls,
        group: int,
        number: int,
        op: int,
        *,
        dtype: int = 0,
        reduction: int = ANY,
        numel: int = ANY,
        root: int = ANY,
        cell: int = 0,
        line: int = 0,
        shape: tuple[int, ...] = (),
    ) -> Self:
        """Make a call.

        Args:
            group: id of the group, equal on all its ranks and unlike any other group's.
            number: counts the calls of the group from 1.
            op: index of the operation's name.
            dtype: index of the element type; 0 for none.
            reduction: code of the reduction, or ANY.
            numel: number of elements that all ranks must agree on, or ANY.
            root: global rank of the source or destination, or ANY.
            cell: as the attribute.
            line: as the attribute.
            shape: as the attribute.
        """
        head = pack_head(group, number, op, dtype, reduction, numel, root)
        return cls(head, cell, line, shape)

    @property
    def what(self) -> What:
        """The fields of `head`."""
        return What(*_HEAD.unpack(self.head))

    def matches(self, other: Call) -> bool:
        """Return whether two ranks may make these calls as one collective."""
        if self.head == other.head:
            return True
        mine, theirs = self.what, other.what
        if mine.op != theirs.op or (mine.dtype != theirs.dtype and mine.dtype and theirs.dtype):
            return False
        return all(a == b or ANY in (a, b) for a, b in zip(mine[4:], theirs[4:], strict=True))


class What(NamedTuple):
    """What a call is, as `Call.of` takes it."""

    group: int
    number: int
    op: int
    dtype: int
    reduction: int
    numel: int
    root: int


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
        shape = call.shape
        dims = (*shape, *_NO_DIMS)[:MAX_DIMS]
        body = call.head + _TAIL.pack(call.cell, call.line, min(len(shape), 255), *dims)
        at = _slot(call.head)
        self._map[at : at + _USED] = body + _CRC.pack(zlib.crc32(body))

    def differs(self, call: Call) -> bool:
        """Return whether this rank's call of the same group and number is known not to match."""
        at = _slot(call.head)
        # An equal head needs no checksum: if it is not whole yet, its writer reads ours next.
        if self._map[at : at + _HEAD.size] == call.head:
            return False
        other = self.read(*_KEY.unpack_from(call.head))
        return other is not None and not call.matches(other)

    def read(self, group: int, number: int) -> Call | None:
        """Return a call, or None when this rank has not made it (or long ago)."""
        at = (group + number) % NUM_SLOTS * _SIZE
        key = _KEY.pack(group, number)
        for _ in range(_READ_TRIES):
            if self._map[at : at + _KEY.size] != key:
                return None
            if (call := self._decode(at)) is not None:
                return call
        return None

    def _decode(self, at: int) -> Call | None:
        raw = self._map[at : at + _USED]
        body = raw[:_BODY]
        cell, line, num_dims, *dims = _TAIL.unpack_from(body, _HEAD.size)
        if _CRC.unpack_from(raw, _BODY)[0] != zlib.crc32(body):
            return None
        return Call(body[: _HEAD.size], cell, line, tuple(dims[:num_dims]))

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()


def _slot(head: bytes) -> int:
    group, number = _KEY.unpack_from(head)
    return int(group + number) % NUM_SLOTS * _SIZE
