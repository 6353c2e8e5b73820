"""Compares a collective call with the calls of the other ranks before anything is sent (rank).

A rank writes its call to its log, then reads what its peers have logged under the same group and
number. The last to arrive sees all, so a difference is always found by somebody, and before that
rank has sent anything.
"""

from __future__ import annotations

import collections
import hashlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch

from nbdist.errors import CollectiveMismatchError, StaleGroupError
from nbdist.rank.calls import ANY, Call, CallLog, pack_head
from nbdist.rank.seen import OPS, REDUCTIONS, Seen

__all__ = ["Checker", "Wait"]

_OP_INDEX = {name: index for index, name in enumerate(OPS)}
_ROOT_NAMES = {"broadcast": "src", "scatter": "src", "reduce": "dst", "gather": "dst"}
_MAX_PENDING = 32


@dataclass(slots=True)
class _Group:
    """A process group as all its ranks know it. Counters count calls, from 1."""

    key: int
    ranks: tuple[int, ...]
    peers: tuple[int, ...]
    name: str
    generation: int
    count: int = 0
    num_messages: int = 0


class Wait(NamedTuple):
    """A call that has not ended; `since` is of the monotonic clock."""

    call: Call
    group: _Group
    peer_to_peer: bool
    since: float


class HasGeneration(Protocol):
    """What the checker needs of the rank's `Group`."""

    generation: int


class Checker:
    """Logs this rank's calls and compares them with those of its peers.

    Args:
        directory: the world's private directory.
        rank: this rank.
        default_group: of this rank; nothing is watched while its generation is negative.
        cell_numbers: returns the numbers of the cells that file names stand for.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        default_group: HasGeneration,
        cell_numbers: Callable[[], dict[str, int]],
    ) -> None:
        self.rank = rank
        self._names: tuple[int, ...] = ()
        self._ranks_directory = directory / "ranks"
        self._log = CallLog(self._path(rank), writable=True)
        self._log_name = rank
        self._peers: dict[int, CallLog] = {}
        self._default_group = default_group
        self._cell_numbers = cell_numbers
        self._lock = threading.Lock()
        self._groups: dict[int, tuple[weakref.ref[Any], _Group | None]] = {}
        self._made: collections.Counter[str] = collections.Counter()
        self._main = threading.main_thread().ident
        self._waiting: Wait | None = None
        self._waited_seconds = 0.0
        self._pending: collections.deque[tuple[weakref.ref[Any], Wait]] = collections.deque(
            maxlen=_MAX_PENDING
        )
        self._functional: Wait | None = None
        dtypes = {str(v).removeprefix("torch."): v for v in vars(torch).values()
                  if isinstance(v, torch.dtype)}  # fmt: skip
        self._dtype_names = ("", *sorted(dtypes))
        self._dtypes = {dtypes[n]: i for i, n in enumerate(self._dtype_names) if n}

    def follow(self, rank: int, names: tuple[int, ...]) -> None:
        """Be a rank of the next generation.

        Logs go by the names: groups of some ranks each, side by side, all have a rank 0.

        Args:
            rank: this rank's number in the group.
            names: what clients call the group's ranks.
        """
        with self._lock:
            self.rank = rank
            if names != self._names:
                self._names = names
                self._peers = {}
            if names[rank] != self._log_name:
                self._log_name = names[rank]
                self._log = CallLog(self._path(self._log_name), writable=True)

    def enter(self, seen: Seen) -> Wait | None:
        """Log a call and compare it; None when it is of no group that is watched.

        Raises:
            CollectiveMismatchError: a peer's call of this number is another one.
        """
        group = self._group(seen.group)
        if group is None:
            return None
        cell, line = self.place_of(sys._getframe(2))
        tensor = seen.tensor
        dtype, shape = (0, ()) if tensor is None else (self._dtypes[tensor.dtype], tensor.shape)
        op, peer_to_peer = _OP_INDEX[seen.op], seen.peer_to_peer
        # Giving the lock back is also the barrier between this store and the loads of `_compare`.
        with self._lock:
            if peer_to_peer:
                group.num_messages = number = group.num_messages + 1
            else:
                group.count = number = group.count + 1
            head = pack_head(
                group.key ^ peer_to_peer, number, op, dtype, seen.reduction, seen.numel, seen.root
            )
            call = Call(head, cell, line, shape)
            self._log.write(call)
        if not peer_to_peer:
            self._compare(call, group)
        wait = Wait(call, group, peer_to_peer, time.monotonic())
        if threading.get_ident() == self._main:
            self._waiting = wait
        return wait

    def leave(self, wait: Wait, result: Any, *, functional: bool) -> None:
        """Note that a call has ended; what goes on behind it is remembered weakly."""
        if self._waiting is wait:
            self._end_wait()
        if functional:
            if threading.get_ident() == self._main:  # a thread that serves has calls of its own
                self._functional = wait
        elif result is not None and hasattr(result, "is_completed"):
            self._pending.append((weakref.ref(result), wait))

    def wait_begins(self) -> None:
        """The main thread waits for the functional collective that it called last."""
        if self._functional is not None and threading.get_ident() == self._main:
            self._waiting = self._functional._replace(since=time.monotonic())

    def wait_ends(self) -> None:
        """The wait of `wait_begins` is over."""
        if threading.get_ident() == self._main:
            self._end_wait()

    def waited_seconds(self) -> float:
        """Return how long the main thread has been inside collectives, all together."""
        return self._waited_seconds

    def _end_wait(self) -> None:
        if self._waiting is not None:
            self._waited_seconds += time.monotonic() - self._waiting.since
        self._waiting = None

    def waiting(self) -> Wait | None:
        """Return the call that the main thread is inside of (any thread)."""
        return self._waiting

    def pending(self) -> Wait | None:
        """Return the oldest asynchronous call that has not completed (any thread)."""
        for reference, wait in tuple(self._pending):
            work = reference()
            try:
                if work is not None and not work.is_completed():
                    return wait
            except RuntimeError:
                continue
        return None

    def counts(self) -> dict[str, int]:
        """Return how many collectives this rank has called, by group (any thread)."""
        with self._lock:
            groups = [group for made, group in self._groups.values() if made() is not None]
            return {f"{group.key:x}": group.count for group in groups if group is not None}

    def place_of(self, frame: FrameType | None) -> tuple[int, int]:
        """Return the cell number and line of the innermost frame that a cell has made."""
        numbers = self._cell_numbers()
        while frame is not None:
            number = numbers.get(frame.f_code.co_filename)
            if number is not None:
                return number, frame.f_lineno or 0
            frame = frame.f_back
        return 0, 0

    def describe(self, call: Call) -> str:
        """Return a call in words, such as `all_reduce(sum) of float32 [8]`."""
        what = call.what
        op = OPS[what.op]
        arguments = []
        if 0 <= what.reduction < len(REDUCTIONS):
            arguments.append(REDUCTIONS[what.reduction])
        if what.root != ANY and op in _ROOT_NAMES:
            arguments.append(f"{_ROOT_NAMES[op]}={what.root}")
        text = f"{op}({', '.join(arguments)})" if arguments else op
        if what.dtype:
            text += f" of {self._dtype_names[what.dtype]} {list(call.shape)}"
        return text

    def _group(self, process_group: Any) -> _Group | None:
        if process_group is None or self._default_group.generation < 0:
            return None
        known = self._groups.get(id(process_group))
        if known is not None and known[0]() is process_group:
            if known[1] is not None and known[1].generation != self._default_group.generation:
                raise StaleGroupError(
                    f"a collective of {known[1].name} was called, which was freed after a failure "
                    "or a stop and made anew; what was built on it (a model's shards, DDP, a "
                    "DeviceMesh) went with it: run the cell that builds the model again"
                )
            return known[1]
        with self._lock:
            made = self._know(process_group)
            self._groups[id(process_group)] = (weakref.ref(process_group), made)
            return made

    def _know(self, process_group: Any) -> _Group | None:
        """Return what identifies a group; ranks that meet in a group have named it alike."""
        from torch.distributed import distributed_c10d as c10d

        if c10d.get_backend(process_group) == "fake":
            return None
        ranks = tuple(c10d.get_process_group_ranks(process_group))
        identity = f"{self._default_group.generation} {process_group.group_name} {ranks}"
        nth = self._made[identity]
        self._made[identity] += 1
        digest = hashlib.blake2b(f"{identity} {nth}".encode(), digest_size=8).digest()
        is_default = process_group is c10d._get_default_group()
        shown = f"{', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"
        return _Group(
            key=int.from_bytes(digest, "little") & ~1,
            ranks=ranks,
            peers=tuple(rank for rank in ranks if rank != self.rank),
            name="the default group" if is_default else f"the group of ranks {shown}",
            generation=self._default_group.generation,
        )

    def _compare(self, call: Call, group: _Group) -> None:
        peers = self._peers
        for rank in group.peers:
            log = peers.get(rank) or self._open(rank)
            if log is not None and log.differs(call):
                raise CollectiveMismatchError(self._difference(call, group))

    def _path(self, name: int) -> Path:
        return self._ranks_directory / f"{name}.calls"

    def _open(self, rank: int) -> CallLog | None:
        try:
            log = self._peers[rank] = CallLog(self._path(self._names[rank]))
        except (FileNotFoundError, ValueError):
            return None  # on another host, or not yet of full size
        return log

    def _difference(self, call: Call, group: _Group) -> str:
        key = call.what[:2]
        logs = {rank: self._peers.get(rank) or self._open(rank) for rank in group.peers}
        theirs = {rank: log.read(*key) for rank, log in logs.items() if log is not None}
        known = {rank: one for rank, one in theirs.items() if one is not None}
        lines = []
        for rank, one in sorted({**known, self.rank: call}.items()):
            place = f", Cell In[{one.cell}], line {one.line}" if one.cell else ""
            lines.append(f"  rank {rank}: #{one.what.number} {self.describe(one)}{place}")
        if missing := sorted(set(group.peers) - set(known)):
            lines.append(f"  rank {', '.join(map(str, missing))}: not there yet")
        return (
            f"collective call #{key[1]} of {group.name} is not the same on all ranks; "
            f"rank {self.rank} found it before sending anything:\n" + "\n".join(lines) + "\n"
            "All ranks of a group must make the same calls in the same order, with equal dtype, "
            "size, reduction and src or dst. Make them equal and run the cell again."
        )
