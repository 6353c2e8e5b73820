"""Ends what a stopped cell has left running: the workers of data loaders (rank)."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from typing import Any

__all__ = ["end_workers"]

PATIENCE_SECONDS = 0.2


def end_workers() -> None:
    """End the worker processes of every DataLoader of this process (main thread).

    A loader whose worker is at its user's code would wait for it, 5 s and more. Loaders with
    persistent workers start new ones in their next pass.
    """
    module = sys.modules.get("torch.utils.data.dataloader")
    if module is None or not multiprocessing.active_children():
        return
    # By `type`: `isinstance` may run code of the user's objects.
    found = gc.get_objects()
    for loader in (each for each in found if issubclass(type(each), module.DataLoader)):
        loader._iterator = None
    iterators = module._MultiProcessingDataLoaderIter
    for iterator in (each for each in found if issubclass(type(each), iterators)):
        if iterator._shutdown:
            continue
        if getattr(iterator, "_worker_pids_set", False):
            # Else torch's SIGCHLD handler raises for workers that do not end by themselves.
            module._utils.signal_handling._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        _end(iterator)
        iterator._shutdown_workers()


def _end(iterator: Any) -> None:
    """Ask the workers of one pass over a loader to end, then make those that have not."""
    iterator._workers_done_event.set()
    for index_queue in iterator._index_queues:
        index_queue.put(None)
    deadline = time.monotonic() + PATIENCE_SECONDS
    for worker in iterator._workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
