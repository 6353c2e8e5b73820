"""Tells a client where this rank is while its main thread computes or hangs (rank)."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.messages import Message, Where, WhereQuery
from nbdist.ports import install_wait_clock
from nbdist.rank.checker import Checker, Wait
from nbdist.rank.hints import hint_for
from nbdist.rank.intercept import install
from nbdist.rank.link import RankLink
from nbdist.rank.replicas import watch_ddp

if TYPE_CHECKING:
    from nbdist.rank.executor import Executor
    from nbdist.rank.group import Group

__all__ = ["Whereabouts", "watch_collectives"]


def watch_collectives(
    directory: Path, link: RankLink, group: Group, executor: Executor
) -> Callable[[int, tuple[int, ...]], None]:
    """Check this rank's collectives and answer where it is, unless that is switched off.

    Returns:
        What is to be told, before each generation of the group, this rank's number in it and what
        clients call its ranks.
    """
    is_checked = os.environ.get("NBDIST_COLLECTIVE_CHECK") != "0"
    watch_ddp(show_calls=is_checked)
    executor.advise = lambda text: hint_for(text, generation=group.generation)
    if not is_checked:
        return lambda _rank, _names: None
    checker = Checker(directory, link.rank, group, lambda: executor.cell_numbers)
    install(checker)
    install_wait_clock(checker.waited_seconds)
    names = lambda ranks: tuple(group.ranks[rank] for rank in ranks)  # noqa: E731
    asks = lambda: executor.asking.waits  # noqa: E731
    Whereabouts(link, checker, lambda: executor.running_cell, asks, names)
    return checker.follow


class Whereabouts:
    """Answers `WhereQuery` on the control thread.

    Args:
        link: where queries come from.
        checker: knows the collective that the main thread is in.
        running_cell: returns the id of the cell that runs; empty when idle.
        asks: returns whether that cell waits for the user's input.
        names: returns what clients call ranks, from their numbers in the group.
    """

    def __init__(
        self,
        link: RankLink,
        checker: Checker,
        running_cell: Callable[[], str],
        asks: Callable[[], bool],
        names: Callable[[tuple[int, ...]], tuple[int, ...]],
    ) -> None:
        self._link = link
        self._checker = checker
        self._running_cell = running_cell
        self._asks = asks
        self._names = names
        link.on_message(WhereQuery, self._tell)

    def _tell(self, message: Message) -> None:
        assert isinstance(message, WhereQuery), message
        cell_id = self._running_cell()
        answer: dict[str, Any] = {}
        if cell_id:
            answer = self._now()
        self._link.emit(
            Where(
                rank=self._link.rank,
                query_id=message.query_id,
                running_cell=cell_id,
                asks=self._asks(),
                counts=self._checker.counts(),
                **answer,
            )
        )

    def _now(self) -> dict[str, Any]:
        """Return the fields of `Where` that tell what the main thread is doing."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        cell, line = self._checker.place_of(frame)
        answer: dict[str, Any] = {"line": f"Cell In[{cell}], line {line}" if cell else ""}
        wait = self._checker.waiting()
        if wait is None and frame is not None:
            # Inside the wait for an asynchronous call, such as FSDP's or at the end of DDP's
            # backward: a C function, so its name stands only in the line that called it.
            # A frame that is just being entered has no line yet.
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)
            is_waiting = "wait" in text or "run_backward" in text
            wait = self._checker.pending() if is_waiting else None
        return answer if wait is None else {**answer, **self._waits(wait)}

    def _waits(self, wait: Wait) -> dict[str, Any]:
        call, group = wait.call, wait.group
        return {
            "waits_in": f"{self._checker.describe(call)}, call #{call.what.number} of {group.name}",
            "waited_seconds": time.monotonic() - wait.since,
            "group": f"{group.key:x}",
            "number": call.what.number,
            "group_ranks": () if wait.peer_to_peer else self._names(group.ranks),
        }
