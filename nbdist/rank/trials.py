"""Runs the objective of `World.search` on the ranks of a group (rank)."""

from __future__ import annotations

import contextlib
import queue
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]

from nbdist.messages import Message, TrialCall, TrialEnded, TrialReply

if TYPE_CHECKING:
    from nbdist.rank.link import RankLink
    from nbdist.rank.output import CellOutput

__all__ = ["Trial", "TrialDesk", "run_trial", "take_objective"]

WAKE_SECONDS = 0.2

Choice = bool | int | float | str | None
"""What may be chosen from: Optuna keeps no other values."""


class Trial:
    """What the objective of `World.search` is given; its methods are those of Optuna's trial.

    All ranks of the group must make the same calls; all get the same answer. The first rank asks
    the client, which takes some milliseconds. Bad arguments raise ValueError on all ranks.

    Args:
        desk: of this rank.
        number: of the trial.

    Attributes:
        number: of the trial in the study.
        params: what has been suggested so far, by name.
    """

    def __init__(self, desk: TrialDesk, number: int) -> None:
        self._desk = desk
        self.number = number
        self.params: dict[str, Choice] = {}

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Return a number from low to high. Collective over: the group."""
        arguments = {"low": low, "high": high, "step": step, "log": log}
        return float(self._suggest("suggest_float", name, arguments))

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """Return a whole number from low to high, both included. Collective over: the group."""
        arguments = {"low": low, "high": high, "step": step, "log": log}
        return int(self._suggest("suggest_int", name, arguments))

    def suggest_categorical(self, name: str, choices: Sequence[Choice]) -> Any:
        """Return one of the choices: numbers, texts, truth values, None. Collective."""
        if odd := [one for one in choices if not isinstance(one, Choice)]:
            raise ValueError(
                f"suggest_categorical({name!r}) was given the choice {odd[0]!r}; give numbers, "
                "texts, truth values or None, and look up by them what they stand for"
            )
        return self._suggest("suggest_categorical", name, {"choices": list(choices)})

    def report(self, value: float, step: int) -> None:
        """Tell how good the trial is after a step, for the pruner. Collective over: the group."""
        self._ask("report", {"value": float(value), "step": int(step)})

    def should_prune(self) -> bool:
        """Return whether the pruner gives the trial up: then `raise optuna.TrialPruned`.

        Collective over: the group.
        """
        return bool(self._ask("should_prune", {}))

    def _suggest(self, method: str, name: str, arguments: dict[str, Any]) -> Any:
        value = self.params[name] = self._ask(method, {"name": name, **arguments})
        return value

    def _ask(self, method: str, arguments: dict[str, Any]) -> Any:
        import torch.distributed as dist

        answer = [self._desk.ask(method, arguments) if dist.get_rank() == 0 else None]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(answer, src=0)
        reply = answer[0]
        assert reply is not None, "the first rank has asked"
        if reply.error:
            raise ValueError(reply.error)
        return reply.value


class TrialDesk:
    """A rank's way to the client that runs its trial.

    Args:
        link: where answers come from.
        output: where calls go.
    """

    def __init__(self, link: RankLink, output: CellOutput) -> None:
        global _desk  # noqa: PLW0603 - one rank is one process
        self._output = output
        self._number = 0
        self._answers: queue.SimpleQueue[TrialReply] = queue.SimpleQueue()
        link.on_message(TrialReply, self._take)
        _desk = self

    def ask(self, method: str, arguments: dict[str, Any]) -> TrialReply:
        """Return the client's answer (main thread)."""
        self._number += 1
        self._output.event(TrialCall, number=self._number, method=method, arguments=arguments)
        while True:
            # With a limit: a signal that comes right before a wait without one would not end it.
            with contextlib.suppress(queue.Empty):
                reply = self._answers.get(timeout=WAKE_SECONDS)
                if reply.number == self._number:  # else that of a trial that was stopped
                    return reply

    def end(self, *, value: float = 0.0, is_pruned: bool = False) -> None:
        """Tell how the trial has ended."""
        self._output.event(TrialEnded, value=value, is_pruned=is_pruned)

    def _take(self, message: Message) -> None:
        assert isinstance(message, TrialReply), message
        self._answers.put(message)


_desk: TrialDesk | None = None
_objectives: dict[str, _Objective] = {}  # of the last search, by its name


class _Objective:
    """An objective; what it names and its client does not have is taken from this rank's names."""

    def __init__(self, packed: bytes) -> None:
        self.function: Callable[[Trial], Any] = cloudpickle.loads(packed)
        names = getattr(self.function, "__globals__", {})
        module = sys.modules.get(names.get("__name__", ""))
        is_imported = module is not None and vars(module) is names
        self._globals = {} if is_imported else names
        self._brought = set(self._globals)

    def __call__(self, trial: Trial) -> Any:
        from nbdist.rank.namespace import user_values

        for name, value in user_values().items():
            if name not in self._brought:
                self._globals[name] = value
        return self.function(trial)


def take_objective(search: str, packed: bytes) -> None:
    """Keep the objective of a search, and of no other."""
    _objectives.clear()
    _objectives[search] = _Objective(packed)


def run_trial(search: str, number: int) -> None:
    """Run the objective. Collective over: the group.

    Args:
        search: name of it.
        number: of the trial.
    """
    assert _desk is not None, "made when the rank began to take cells"
    try:
        value = _objectives[search](Trial(_desk, number))
    except Exception as error:
        if not _is_pruned(error):
            raise
        _desk.end(is_pruned=True)
        return
    try:
        _desk.end(value=float(value))
    except (TypeError, ValueError):
        raise TypeError(
            f"the objective returned a {type(value).__name__}, {value!r:.60}; return the number to "
            "be minimized or maximized"
        ) from None


def _is_pruned(error: Exception) -> bool:
    """Return whether an error is Optuna's: it need not be installed on a rank."""
    optuna = sys.modules.get("optuna")
    return optuna is not None and isinstance(error, optuna.TrialPruned)
