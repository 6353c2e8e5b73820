"""Makes, frees and re-makes the process group of a rank (rank).

A *generation* is one life of the default group. All groups of a generation share its fate.

gloo offers no call that frees a thread blocked in a collective. Each gloo group has an event
loop of its own, seen as one epoll descriptor; its sockets are listed under
`/proc/self/fdinfo`. Shutting those sockets down makes every waiting rank raise at once. The
ledger holds the epoll descriptors that appeared while a group was being made.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["GroupLedger", "Group"]

log = logging.getLogger(__name__)


def _epolls() -> set[tuple[int, int]]:
    """Return (descriptor, inode) of every epoll instance of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - Path.iterdir costs ten times more
        with contextlib.suppress(OSError):
            path = f"/proc/self/fd/{name}"
            if os.readlink(path) == "anon_inode:[eventpoll]":  # noqa: PTH115
                found.add((int(name), os.stat(path).st_ino))  # noqa: PTH116
    return found


def _sockets(epoll: int) -> Iterator[socket.socket]:
    """Yield the connected TCP sockets that an epoll instance watches, duplicated."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/self/fdinfo/{epoll}").read_text()
        for line in text.splitlines():
            if not line.startswith("tfd:"):
                continue
            with contextlib.suppress(OSError):
                sock = socket.socket(fileno=os.dup(int(line.split()[1])))
                with sock:
                    # A listening socket is left alone: gloo ends the process when it breaks.
                    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if sock.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                        yield sock


def _forget_meshes() -> None:
    """Clear DTensor's caches: they answer with meshes of earlier groups.

    Such a mesh equals the new one of that shape, but has this rank's old place and dead groups.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


class GroupLedger:
    """Remembers which sockets belong to process groups.

    `install` wraps the one function that makes every group, so groups that user code, a
    DeviceMesh or a library makes are covered as well.
    """

    def __init__(self) -> None:
        self._epolls: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def install(self) -> None:
        """Start recording; called once, after torch has been imported."""
        from torch.distributed import distributed_c10d

        make: Callable[..., Any] = distributed_c10d._new_process_group_helper

        def recorded(*args: Any, **kwargs: Any) -> Any:
            before = _epolls()
            try:
                return make(*args, **kwargs)
            finally:
                with self._lock:
                    self._epolls |= _epolls() - before

        distributed_c10d._new_process_group_helper = recorded

    def shut_down_sockets(self) -> int:
        """Break every connection of every group of this process; return how many.

        Ranks that wait in a collective, here and elsewhere, raise `RuntimeError` at once.
        """
        count = 0
        with self._lock:
            alive = self._epolls & _epolls()
            self._epolls = set()
        for epoll, _ in alive:
            for sock in _sockets(epoll):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count


class Group:
    """The default process group of this rank, generation by generation.

    Args:
        device: `cpu` or `cuda:N`.

    Attributes:
        rank: this rank's number in it.
        ranks: what its ranks are called by clients, in order; see `JoinGroup`.
    """

    def __init__(self, device: str) -> None:
        self.rank = -1
        self.ranks: tuple[int, ...] = ()
        self.device = device
        self.generation = -1
        self._ledger = GroupLedger()
        self._installed = False

    @property
    def backend(self) -> str:
        """The backend string: gloo for host tensors, NCCL for device tensors."""
        return "cpu:gloo,cuda:nccl" if self.device.startswith("cuda") else "gloo"

    @property
    def world_size(self) -> int:
        """Number of its ranks."""
        return len(self.ranks)

    def place(self, rank: int, ranks: tuple[int, ...]) -> None:
        """Set who its ranks are called, and which of them this one is."""
        self.rank, self.ranks = ranks.index(rank), ranks

    def join(self, generation: int, store_path: str, timeout_seconds: float) -> None:
        """Leave the present generation, join another and verify it by a collective.

        Collective over: all of its ranks. Runs on the main thread.

        Raises:
            RuntimeError: the group was made but its first sum is wrong, or a peer did not come.
        """
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import FileStore

        if not self._installed:
            self._ledger.install()
            self._installed = True
        self.leave()
        _forget_meshes()
        # Each generation has a store of its own: addresses of an earlier one are never read.
        store = FileStore(f"{store_path}.{generation}", self.world_size)
        timeout = timedelta(seconds=timeout_seconds)
        bound = torch.device(self.device) if self.device.startswith("cuda") else None
        dist.init_process_group(
            self.backend,
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
            device_id=bound,
        )
        total = torch.ones(1, device=self.device) * (self.rank + 1)
        dist.all_reduce(total)
        expected = self.world_size * (self.world_size + 1) // 2
        if int(total.item()) != expected:
            raise RuntimeError(f"first all_reduce gave {int(total.item())}, expected {expected}")
        self.generation = generation

    def leave(self) -> None:
        """Destroy the present group, if any; nothing is raised for a group that is broken."""
        import torch.distributed as dist

        if not dist.is_initialized():
            return
        self._ledger.shut_down_sockets()
        gc.collect()
        try:
            dist.destroy_process_group()
        except RuntimeError:
            log.exception("rank %d: destroying generation %d", self.rank, self.generation)
        self.generation = -1

    def abort(self, generation: int) -> None:
        """Free whatever waits in a collective of this generation; callable from any thread."""
        if generation != self.generation:
            return
        if self.device.startswith("cuda"):
            self._abort_nccl()
        self._ledger.shut_down_sockets()

    def _abort_nccl(self) -> None:
        """Abort NCCL's communicators from a side thread: the abort itself may hang."""
        from torch.distributed import distributed_c10d

        aborting = threading.Thread(
            target=distributed_c10d._abort_process_group,
            name="nbdist-nccl-abort",
            daemon=True,
        )
        aborting.start()
        aborting.join(timeout=5.0)
        if aborting.is_alive():
            log.error("rank %d: NCCL abort still runs after 5 s", self.rank)
