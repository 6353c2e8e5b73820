"""The study of a search: trials to run, answers to ranks, what came of them (client).

Optuna proposes and judges; what is here keeps count and makes the calls of several groups one
after the other.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import optuna

    from nbdist.messages import TrialCall, TrialEnded, TrialReply

__all__ = ["Book", "Direction", "open_study"]

Direction = Literal["minimize", "maximize"]

_METHODS = ("suggest_float", "suggest_int", "suggest_categorical", "report", "should_prune")
_ATTEMPT = "attempt"


def open_study(
    study: optuna.Study | None,
    direction: Direction,
    sampler: optuna.samplers.BaseSampler | None,
    pruner: optuna.pruners.BasePruner | None,
) -> optuna.Study:
    """Return the study of a search: the given one, or a new one in memory.

    Raises:
        ImportError: Optuna is not installed; the text names the command.
        ValueError: the study was given with what it has itself, or has several directions.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError(
            "`World.search` needs Optuna, which is not installed where this notebook or script "
            'runs; run: pip install "nbdist[tune]"'
        ) from error
    if study is None:
        return optuna.create_study(direction=direction, sampler=sampler, pruner=pruner)
    if sampler is not None or pruner is not None or direction != "minimize":
        raise ValueError(
            "search was given a study, and a direction, sampler or pruner beside it: a study has "
            "its own; leave them out, or set study.sampler and study.pruner"
        )
    if len(study.directions) > 1:
        raise ValueError(
            f"search was given a study with {len(study.directions)} directions, but an objective "
            "here returns one number; give a study with one direction"
        )
    return study


class Book:
    """What the groups' threads share.

    Args:
        study: of the search.
        num_trials: how many are to be run.
        retries: how often a trial is tried again after the death of a rank.

    Attributes:
        study: the same.
        num_trials: the same.
        num_ended: of these, those that have ended and are not tried again.
    """

    def __init__(self, study: optuna.Study, num_trials: int, retries: int) -> None:
        self.study = study
        self.num_trials = num_trials
        self.num_ended = 0
        self._retries = retries
        self._num_to_ask = num_trials
        self._is_closed = False
        self._lock = threading.Lock()

    def next(self, ranks: str) -> optuna.Trial | None:
        """Return a trial for the ranks of a group; None when no more are to be begun now."""
        with self._lock:
            if self._is_closed or not self._num_to_ask:
                return None
            self._num_to_ask -= 1
            trial = self.study.ask()
            trial.set_user_attr("ranks", ranks)
            return trial

    def close(self) -> None:
        """Begin no more trials."""
        with self._lock:
            self._is_closed = True

    def answer(self, trial: optuna.Trial, call: TrialCall) -> TrialReply:
        """Return what Optuna answers to a call of the objective."""
        if call.method not in _METHODS:
            return call.reply(error=f"a trial has no {call.method!r}; it has {_METHODS}")
        with self._lock:
            try:
                return call.reply(getattr(trial, call.method)(**call.arguments))
            except Exception as error:  # noqa: BLE001 - a sampler's own too: the objective raises it
                return call.reply(error=f"{type(error).__name__}: {error}")

    def take(self, trial: optuna.Trial, ended: TrialEnded) -> None:
        """Note how an objective has ended by itself."""
        if ended.is_pruned:
            self._tell(trial, state="PRUNED")
        elif math.isnan(ended.value):
            self.fail(trial, "the objective returned nan")
        else:
            self._tell(trial, ended.value)

    def fail(self, trial: optuna.Trial, why: str) -> None:
        """Note that a trial has failed for good."""
        self._tell(trial, state="FAIL", error=why)

    def stopped(self, trial: optuna.Trial) -> None:
        """Note that a trial was not let run to its end."""
        self._tell(trial, state="FAIL", error="stopped", is_last=False)

    def died(self, trial: optuna.Trial, why: str) -> None:
        """Note that a rank has died; another trial with the same parameters takes its place."""
        attempt = trial.user_attrs.get(_ATTEMPT, 1)
        if attempt > self._retries:
            self.fail(trial, why)
        else:
            self.put_back(trial, why, attempt + 1)

    def put_back(self, trial: optuna.Trial, why: str, attempt: int = 1) -> None:
        """Have another trial with the same parameters take the place of one."""
        import optuna

        with self._lock:
            self._num_to_ask += 1
            before = self.study.get_trials(deepcopy=False)[trial.number]
            # it may have died before it asked for all that it was to try again
            params = before.system_attrs.get("fixed_params", {}) | trial.params
            again = optuna.create_trial(
                state=optuna.trial.TrialState.WAITING,
                user_attrs={"retry_of": trial.number, _ATTEMPT: attempt},
                # what `enqueue_trial` notes, and what the sampler has, such as a place in its grid
                system_attrs={**before.system_attrs, "fixed_params": params},
            )
            self.study.add_trial(again)
        self._tell(trial, state="FAIL", error=why, is_last=False)

    def best(self) -> float | None:
        """Return the best value so far; None when there is none."""
        with self._lock:
            try:
                return self.study.best_value
            except ValueError:  # none is complete
                return None

    def _tell(
        self,
        trial: optuna.Trial,
        value: float | None = None,
        *,
        state: str = "COMPLETE",
        error: str = "",
        is_last: bool = True,
    ) -> None:
        from optuna.trial import TrialState

        told: Any = TrialState[state]
        with self._lock:
            if error:
                trial.set_user_attr("error", error)
            try:
                self.study.tell(trial, value, told)
            except RuntimeError as wish:
                # A grid that has been tried asks for the end. What counts is `num_trials`; the
                # trial has been told.
                if "Study.stop" not in str(wish):
                    raise
            self.num_ended += is_last
