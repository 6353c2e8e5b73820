"""Runs cells one after another, and one cell on while the number of ranks changes (client)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from nbdist.cluster.cell import CellRun
from nbdist.cluster.mapping import Run
from nbdist.cluster.pausing import Wanted
from nbdist.cluster.recovering import Recovering
from nbdist.cluster.resizing import Resized, Resizing, check_number
from nbdist.cluster.watch import Watch
from nbdist.errors import NbdistError, RankBusyError, RankLostError
from nbdist.messages import (
    AskResize,
    CellNote,
    Message,
    RankInfo,
    RanksChanged,
    ResizeAsked,
    RunCell,
)

__all__ = ["Running"]

Events = Generator[Message | None, None, None]


class Running(Resizing):
    """The part of `World` that runs cells."""

    _run: Run | None
    _runner: int = 0  # the thread that runs a cell

    def resize(
        self, num_ranks: int, on_stage: Callable[[str], None] | None = None
    ) -> Resized | None:
        """Start or end ranks until there are `num_ranks`; the ranks that stay keep their names.

        New ranks get copies of the names of the first rank that stays. Trainers that a name
        stands for are built anew for the new mesh and go on where they were, with the same
        global batch: `fit()` in the next cell. Lost ranks are not counted as being there.

        May be called from another thread while a cell of this client is inside `trainer.fit()`:
        the ranks stop together after the running step, and the cell goes on with the new ones.

        Args:
            num_ranks: how many there are to be.
            on_stage: is told in words what is done.

        Returns:
            What was done; None when that was nothing.

        Raises:
            ValueError: `num_ranks` is no number of ranks.
            RankBusyError: a rank runs a cell that cannot go on after a stop, or another client's
                (see `ask_resize`).
            NbdistError: no rank lives, or a trainer's mesh has no such size; nothing was touched.
            StartError: a process did not come up; the world is as it was.
        """
        check_number(num_ranks)
        run = self._run
        if not isinstance(run, CellRun):
            return super().resize(num_ranks, on_stage)
        if self._runner == threading.get_ident():
            raise RankBusyError(
                f"{num_ranks} ranks were asked for by the thread that runs a cell; ask from "
                "another thread, or after the cell"
            )
        if num_ranks == self.record.num_ranks and not self._link.lost_ranks:
            return None
        wanted = Wanted(num_ranks=num_ranks, on_stage=on_stage)
        run.pause_for(wanted)
        resized: Resized | None = wanted.answer.result()
        return resized

    def ask_resize(self, num_ranks: int) -> None:
        """Ask the client whose cell runs to change the number of ranks; returns at once.

        What comes of it is told under that cell. This client must attach again after it.

        Raises:
            ValueError: `num_ranks` is no number of ranks.
            NbdistError: no rank runs a cell.
        """
        check_number(num_ranks)
        busy = [info.rank for info in self.status() if info.running_cell]
        if not busy:
            raise NbdistError("no rank runs a cell any more; `%distributed resize` again")
        self._link.post(busy[0], AskResize(num_ranks=num_ranks))

    def _stream(self, request: RunCell, timeout_seconds: float | None) -> Events:
        with self._lock:
            while True:
                run = self._begin(request, timeout_seconds)
                yield from self._events(run)
                if run.pause is None or not run.pause.is_over:
                    return
                request = dataclasses.replace(
                    request,
                    rejoin=(),
                    resumes=run.pause.call,
                    ranks=self._changed(run.pause.wanted),
                )
                yield RanksChanged(cell_id=request.cell_id, ranks=request.ranks)
                text = _told(run.pause.wanted)
                yield CellNote(cell_id=request.cell_id, text=text, ranks=request.ranks[:1])

    def _begin(self, request: RunCell, timeout_seconds: float | None) -> CellRun:
        # Without its lost ranks there is no group to make; the others run what needs none.
        if self._group_broken and not self._link.lost_ranks:
            self._remake_group()
        directory, num_ranks = Path(self.record.directory), self.record.num_ranks
        watch = Watch(self._link, request, num_ranks)
        recovering = Recovering(directory, self._link, request, self._generation, self)
        return CellRun(self._link, request, timeout_seconds, watch, recovering)

    def _events(self, run: CellRun) -> Events:
        """Run a cell until it ends, fails or is paused."""

        def resize_asked(_rank: int, event: Message) -> None:
            assert isinstance(event, ResizeAsked), event
            wanted = Wanted(num_ranks=event.num_ranks, on_stage=None)
            wanted.answer.add_done_callback(lambda _answer: run.tell(_told(wanted)))
            run.pause_for(wanted)

        forget = self._link.subscribe(ResizeAsked, resize_asked)
        self._run, self._runner = run, threading.get_ident()
        try:
            try:
                run.start()
                yield from run.events()
            finally:
                forget()
                self._run = None
                self._group_broken = self._group_broken or run.group_aborted
            run.raise_for_failure(self.lost_error)
        finally:
            self.leave_out(run.gone)

    def _changed(self, wanted: Wanted) -> tuple[int, ...]:
        """Change the number of ranks while the cell pauses; answer, and return the ranks."""
        try:
            resized = self._resize(wanted.num_ranks, wanted.on_stage)
        except BaseException as error:
            wanted.answer.set_exception(error)
            if not isinstance(error, NbdistError):
                raise
        else:
            wanted.answer.set_result(resized)
        return tuple(range(self.record.num_ranks))

    def status(self) -> list[RankInfo]:
        """See `World`."""
        raise NotImplementedError

    def lost_error(self, ranks: Sequence[int], text: str) -> RankLostError:
        """See `Searching`."""
        raise NotImplementedError


def _told(wanted: Wanted) -> str:
    error = wanted.answer.exception()
    if error is not None:
        return f"the cell goes on as it was: {error}"
    resized: Resized | None = wanted.answer.result()
    if resized is None:
        return "the number of ranks is as it was; the cell goes on"
    behind = "".join(f"; `{name}` stays behind: {why}" for name, why in resized.behind.items())
    return f"{resized.before} ranks made {resized.after}; the cell goes on{behind}"
