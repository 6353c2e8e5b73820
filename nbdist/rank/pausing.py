"""Stops a cell inside `fit()` where it can go on later, on another number of ranks (rank)."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from nbdist.messages import AskResize, Message, PauseCell, PauseSite, ResizeAsked
from nbdist.rank.rejoin import pause_site

if TYPE_CHECKING:
    from nbdist.rank.executor import Executor
    from nbdist.rank.link import RankLink

__all__ = ["Pauser"]


class Pauser:
    """Answers clients on the control thread.

    Args:
        link: to the clients.
        executor: runs the cells.
    """

    def __init__(self, link: RankLink, executor: Executor) -> None:
        self._link = link
        self._executor = executor
        link.on_message(PauseCell, self._pause)
        link.on_message(AskResize, self._pass_on)

    def _pause(self, message: Message) -> None:
        assert isinstance(message, PauseCell), message
        if self._executor.running_cell != message.cell_id:
            return  # it has ended, and the client is told so
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        call, problem = pause_site(frame, self._executor.cell_numbers)
        if not problem and not self._executor.defers_stops:
            problem = "the cell is not inside the steps of fit()"
        if message.commit and not problem:
            self._executor.interrupt(message.cell_id)
            return
        self._link.emit(
            PauseSite(rank=self._link.rank, cell_id=message.cell_id, call=call, problem=problem)
        )

    def _pass_on(self, message: Message) -> None:
        assert isinstance(message, AskResize), message
        self._link.emit(ResizeAsked(rank=self._link.rank, num_ranks=message.num_ranks))
