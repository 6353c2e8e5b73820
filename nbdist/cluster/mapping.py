"""`World.map`: many small tasks, balanced over the ranks (client)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nbdist.cluster.cell import CellRun
from nbdist.cluster.link import WorldLink
from nbdist.cluster.maprun import MapRun, pack_task
from nbdist.cluster.objects import Objects
from nbdist.cluster.search import SearchRun
from nbdist.cluster.source import check_ranks
from nbdist.errors import RankBusyError
from nbdist.messages import RankInfo

__all__ = ["Mapping", "Run"]

Run = CellRun | MapRun | SearchRun
"""What a world does for one of its callers; `stop` ends it, from any thread."""

MAX_BATCH = 256
BATCHES_PER_RANK = 8  # enough that a slow batch at the end holds up little


class Mapping:
    """The part of `World` that spreads stateless work."""

    infos: list[RankInfo]
    _link: WorldLink
    _objects: Objects
    _run: Run | None
    _lock: threading.Lock

    def map(
        self,
        fn: Callable[[Any], Any],
        items: Iterable[Any],
        *,
        batch: int | None = None,
        ranks: Sequence[int] | str | None = None,
        retries: int = 1,
        progress: bool = True,
    ) -> list[Any]:
        """Call `fn(item)` for every item, each on one of the ranks; return results in order.

        A rank gets its next batch when it has answered the last one, so quick ranks do more.
        When a rank dies the others do what it had not answered, one by one, and a warning tells
        so at the end: an item may run twice, its result is returned once. Items and results
        travel one by one as pickles; `push` what is large and the same for all. The function
        should use no collective. Stop ends the items that run; the ranks are kept.

        Args:
            fn: may be a lambda, a closure or defined in the notebook.
            items: any number.
            batch: items that a rank gets at once; None chooses by their number.
            ranks: which ones, as numbers or as text like `0,2:4`; None for all that live.
            retries: how often an item is tried again after the death of its rank.
            progress: show a bar.

        Raises:
            ItemError: an item failed; the text names it.
            RankLostError: an item's ranks died too often, or no rank is left.
            RankBusyError: a rank runs another client's cell.
        """
        for name, value, least in (("batch", batch, 1), ("retries", retries, 0)):
            if value is not None and value < least:
                raise ValueError(f"map got {name}={value}; set {name} >= {least}")
        chosen = check_ranks(ranks, len(self.infos))
        if ranks is None:
            chosen = tuple(set(chosen) - self._link.lost_ranks) or chosen
        self._check_alive(chosen)
        task = pack_task(fn, items, retries=retries)
        if not task.items:
            return []
        size = batch or max(1, min(MAX_BATCH, len(task.items) // (BATCHES_PER_RANK * len(chosen))))
        with self._lock:
            self._check_free(chosen, "map")
            run = self._run = MapRun(self._objects, self._link, lambda: self.infos, task)
            try:
                return run.results(chosen, size, progress=progress)
            finally:
                self._run = None

    def _check_free(self, ranks: Sequence[int], asked: str) -> None:
        busy = [info.rank for info in self.status() if info.running_cell and info.rank in ranks]
        if busy:
            raise RankBusyError(
                f"{asked} was not run: rank {', '.join(map(str, busy))} runs another client's "
                "cell; wait, or `%distributed interrupt`"
            )

    def _check_alive(self, ranks: Sequence[int]) -> None:
        raise NotImplementedError

    def status(self) -> list[RankInfo]:
        """See `World.status`."""
        raise NotImplementedError
