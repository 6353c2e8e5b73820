"""`World.search`: hyperparameters, tried by groups of ranks side by side (client)."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.cluster import starting
from nbdist.cluster.death import lost_error
from nbdist.cluster.healing import Healing, end_ranks
from nbdist.cluster.mapping import Mapping
from nbdist.cluster.maprun import dumps
from nbdist.cluster.search import SearchResult, SearchRun
from nbdist.cluster.search.book import Book, Direction, open_study
from nbdist.cluster.search.groups import Objective, RankGroup
from nbdist.cluster.source import check_ranks
from nbdist.errors import RankLostError

if TYPE_CHECKING:
    import optuna

__all__ = ["Searching"]

POLL_SECONDS = 0.05
JOIN_SECONDS = 20.0


class Searching(Mapping, Healing):
    """The part of `World` that searches.

    Attributes:
        last_search: of this client, as far as it came.
    """

    last_search: SearchResult | None = None
    _noting = threading.Lock()
    _mending = threading.Lock()
    _calling = threading.Lock()

    def search(
        self,
        objective: Callable[[Any], float],
        num_trials: int,
        *,
        groups: int | None = None,
        ranks: Sequence[int] | str | None = None,
        direction: Direction = "minimize",
        sampler: optuna.samplers.BaseSampler | None = None,
        pruner: optuna.pruners.BasePruner | None = None,
        study: optuna.Study | None = None,
        retries: int = 1,
        keep_going: bool = False,
        timeout_seconds: float | None = None,
        progress: bool = True,
    ) -> SearchResult:
        """Look for the parameters with the best objective; Optuna proposes and prunes trials.

        The ranks are divided into groups of equal size, each of which runs one trial after the
        other. To an objective its group is the world: `rank`, `world_size` and `mesh`, the default
        process group, `build_mesh` and `Trainer` are of the group, made anew for each trial. All
        ranks of the group call `objective(trial)`; `trial` has Optuna's `suggest_float`,
        `suggest_int`, `suggest_categorical`, `report` and `should_prune`, and the value that the
        first rank returns counts. Names that the objective uses and the client does not have are
        the ranks' own. What it prints is in the ranks' logs.

        When a rank dies its trial has failed, a process is started in its place, and the trial's
        parameters are tried again; the other groups go on. Stop ends the trials that run and keeps
        the study in `last_search`. Afterwards all ranks are one process group again, a new one:
        models and meshes that were built before must be built again.

        Args:
            objective: called on ranks; may be a lambda, a closure or defined in the notebook.
            num_trials: how many to run; trials that are tried again count once.
            groups: how many groups; None for one a rank.
            ranks: which ones, as numbers or as text like `0,2:4`; None for all.
            direction: "minimize" or "maximize".
            sampler: Optuna's; None for its default, TPE.
            pruner: Optuna's; None for its default, the median.
            study: to go on with, instead of the three above.
            retries: how often a trial is tried again after the death of a rank.
            keep_going: a trial whose objective raises is failed and the others go on; False ends
                the search.
            timeout_seconds: longest time of a trial, which then has failed; None for no limit.
            progress: show a bar.

        Raises:
            ImportError: Optuna is not installed.
            ValueError: the ranks cannot be divided so; other arguments; nothing was touched.
            TrialError: an objective raised.
            RankLostError: a rank is lost before it begins.
            RankBusyError: a rank runs another client's cell.
            NbdistError: no group was left to run the rest.
        """
        _check(num_trials, retries, direction, timeout_seconds)
        chosen = check_ranks(ranks, len(self.infos))
        parts = _divide(chosen, len(chosen) if groups is None else groups)
        book = Book(open_study(study, direction, sampler, pruner), num_trials, retries)
        packed = dumps(objective, "the objective", "search")
        self._check_alive(chosen)
        one = Objective(search=uuid.uuid4().hex, packed=packed, timeout_seconds=timeout_seconds)
        directory = Path(self.record.directory)
        members = [RankGroup(self, self._link, directory, part, one) for part in parts]
        with self._lock:
            self._check_free(chosen, "search")
            run = self._run = SearchRun(book, members, keep_going=keep_going)
            self.last_search = SearchResult(book.study)
            self._generation = self._last_generation(chosen)
            self._group_broken = True
            try:
                run.finish(progress=progress)
            finally:
                self._run = None
                if not run.lost_groups:
                    self._join_all()
        return self.last_search

    def join_part(self, ranks: Sequence[int]) -> int:
        """See `SearchWorld`."""
        with self._noting:
            self._generation += 1
            generation = self._generation
        joined = starting.join_group(self._link, self.record, generation, ranks, JOIN_SECONDS)
        with self._noting:
            self._note(joined)
        return generation

    def replace_lost(self, ranks: Sequence[int]) -> None:
        """See `SearchWorld`."""
        with self._mending:  # one after the other: launchers and spares are the world's
            lost = sorted(self._link.lost_ranks & set(ranks))
            self.bring_up(lost, lambda _text: None)

    def end_stuck(self, ranks: Sequence[int]) -> None:
        """See `SearchWorld`."""
        end_ranks(self._link, self.infos, ranks)

    def call_idle(self, fn: Callable[..., Any], args: tuple[Any, ...], rank: int) -> None:
        """See `SearchWorld`."""
        with self._calling:
            answer = self._objects.submit(fn, args, rank)
            while not answer.done():
                answer.wait(POLL_SECONDS)
                if rank in self._link.lost_ranks and not answer.done():
                    raise self.lost_error([rank], "rank {ranks} died when a trial was to begin")
            self._objects.result(answer, rank)

    def push_again(self, rank: int) -> None:
        """See `SearchWorld`."""
        with self._calling:
            self._objects.push_again(rank)

    def lost_error(self, ranks: Sequence[int], text: str) -> RankLostError:
        """See `SearchWorld`."""
        return lost_error(Path(self.record.directory), self.infos, ranks, text)

    def _join_all(self) -> None:
        """Make the group of all ranks again, unless one is lost or does not end its trial."""
        infos = self.status()
        if len(infos) == len(self.infos) and not any(info.running_cell for info in infos):
            self._remake_group()


def _check(num_trials: int, retries: int, direction: str, timeout_seconds: float | None) -> None:
    for name, value, least in (("num_trials", num_trials, 1), ("retries", retries, 0)):
        if value < least:
            raise ValueError(f"search got {name}={value}; set {name} >= {least}")
    if direction not in ("minimize", "maximize"):
        raise ValueError(
            f"search got direction={direction!r}, which Optuna does not know; set "
            'direction="minimize" or "maximize"'
        )
    if timeout_seconds is not None and not timeout_seconds > 0:
        raise ValueError(f"search got timeout_seconds={timeout_seconds}; set it > 0, or None")


def _divide(ranks: tuple[int, ...], groups: int) -> list[tuple[int, ...]]:
    """Return groups of neighbours, equal in size."""
    if groups < 1 or len(ranks) % groups:
        fitting = [n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]
        raise ValueError(
            f"search was to divide {len(ranks)} ranks into groups={groups} of equal size; set "
            f"groups to one of {fitting}, or choose other ranks"
        )
    size = len(ranks) // groups
    return [ranks[i : i + size] for i in range(0, len(ranks), size)]
