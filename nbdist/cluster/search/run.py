"""One run of `World.search`: a thread a group, and what becomes of their trials (client)."""

from __future__ import annotations

import functools
import queue
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from nbdist.cluster.bar import Bar
from nbdist.errors import (
    CellInterrupted,
    CellTimeoutError,
    NbdistError,
    RankLostError,
    RemoteCellError,
    TrialError,
)

if TYPE_CHECKING:
    import optuna

    from nbdist.cluster.search.book import Book
    from nbdist.cluster.search.groups import RankGroup

__all__ = ["SearchRun"]

POLL_SECONDS = 0.05


class SearchRun:
    """Has groups of ranks run trials side by side.

    Args:
        book: the trials.
        groups: of ranks.
        keep_going: a trial whose objective raises does not end the search.

    Attributes:
        lost_groups: groups that could not go on, and why.
    """

    def __init__(self, book: Book, groups: Sequence[RankGroup], *, keep_going: bool) -> None:
        self._book = book
        self._groups = groups
        self._keep_going = keep_going
        self._is_stopped = self._is_ending = False
        self._failure: BaseException | None = None
        self.lost_groups: list[tuple[RankGroup, NbdistError]] = []
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def stop(self) -> None:
        """End the search, from any thread; asked again, end the trials at once."""
        self._is_stopped = True
        self._end()

    def _end(self) -> None:
        self._is_ending = True
        self._book.close()
        for group in self._groups:
            group.stop()

    def finish(self, *, progress: bool) -> None:
        """Run all trials; see `World.search`."""
        threads = [
            threading.Thread(target=self._work, args=(group,), name=f"nbdist-search-{group}")
            for group in self._groups
        ]
        with Bar(total=self._book.num_trials, shown=progress, desc="search", unit="trial") as bar:
            for thread in threads:
                thread.start()
            goes_on = True
            while goes_on:
                try:
                    with suppress(queue.Empty):
                        self._news.get(timeout=POLL_SECONDS)
                    goes_on = any(thread.is_alive() for thread in threads)
                    self._show(bar)
                except KeyboardInterrupt:
                    self.stop()
        self._raise()

    def _show(self, bar: Bar) -> None:
        best = self._book.best()
        if best is not None:
            bar.set_postfix_str(f"best {best:.6g}", refresh=False)
        bar.update(self._book.num_ended - bar.n)

    def _raise(self) -> None:
        """Raise the one error of the search, if there is one."""
        done = f"{self._book.num_ended} of {self._book.num_trials} trials were done"
        if self._failure is not None:
            raise self._failure
        if self._is_stopped:
            raise CellInterrupted(f"{done}; they are in `last_search` of the world")
        if not self.lost_groups:
            return
        group, error = self.lost_groups[0]
        text = f"the ranks {group} could not go on: {error}"
        if self._book.num_ended < self._book.num_trials:
            raise NbdistError(
                f"{done}, then no ranks were left: {text}; `%distributed heal`, then go on with "
                "search(..., study=world.last_search.study)"
            ) from error
        warnings.warn(f"{text}; the others did their trials", RuntimeWarning, stacklevel=4)

    def _work(self, group: RankGroup) -> None:
        """Run trials until there are no more (thread of the group)."""
        try:
            group.heal()
            while (trial := self._book.next(str(group))) is not None:
                self._run_trial(group, trial)
                self._news.put(None)
                group.heal()
        except NbdistError as error:
            self.lost_groups.append((group, error))
        except BaseException as error:  # noqa: BLE001 - such as a sampler's: raised by `finish`
            self._failure = self._failure or error
            self._end()

    def _run_trial(self, group: RankGroup, trial: optuna.Trial) -> None:
        book = self._book
        try:
            ended = group.run(trial.number, functools.partial(book.answer, trial))
        except RankLostError as error:
            book.died(trial, str(error))
        except KeyboardInterrupt:
            book.stopped(trial)
            if not self._is_ending:  # another client has stopped the ranks
                self.stop()
        except CellTimeoutError as error:
            book.fail(trial, str(error))
        except RemoteCellError as error:
            book.fail(trial, str(error))
            if not self._keep_going:
                self._failure = self._failure or TrialError(trial.number, trial.params, error)
                self._end()
        except NbdistError as error:  # the ranks are at fault, not the trial
            book.put_back(trial, str(error))
            raise
        else:
            book.take(trial, ended)
