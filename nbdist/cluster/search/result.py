"""What a search has found, as a table (client)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna

__all__ = ["SearchResult"]

MAX_ROWS = 40
ERROR_CHARACTERS = 60


class SearchResult:
    """The trials of a search; print it, or end a cell with it.

    Args:
        study: of the search.

    Attributes:
        study: Optuna's, with every trial; give it to the next search to go on from it. The user
            attributes of a trial are `ranks`, and where it has them `error`, `retry_of`, `attempt`.
    """

    def __init__(self, study: optuna.Study) -> None:
        self.study = study

    @property
    def best_params(self) -> dict[str, Any]:
        """The parameters of the best trial; ValueError when none was completed."""
        return self.study.best_params

    @property
    def best_value(self) -> float:
        """The value of the best trial; ValueError when none was completed."""
        return self.study.best_value

    def __str__(self) -> str:
        """Return the best trial, then a line for each, the best first."""
        trials = self.study.get_trials(deepcopy=False)
        states = [trial.state.name.lower() for trial in trials]
        counts = [f"{states.count(name)} {name}" for name in dict.fromkeys(sorted(states))]
        head = f"{len(trials)} trials: {', '.join(counts)}" if trials else "no trials"
        done = [trial for trial in trials if trial.state.name == "COMPLETE"]
        if done:
            best = self.study.best_trial
            head += f"; best {_number(best.value)} (trial {best.number}): {_params(best.params)}"
        sign = -1 if self.study.direction.name == "MAXIMIZE" else 1
        rest = [trial for trial in trials if trial.state.name != "COMPLETE"]
        rows = [*sorted(done, key=lambda trial: sign * (trial.value or 0.0)), *rest]
        lines = [head, *_aligned([_HEAD, *map(_row, rows[:MAX_ROWS])])] if rows else [head]
        if len(rows) > MAX_ROWS:
            lines.append(f"and {len(rows) - MAX_ROWS} more, in .study.trials")
        return "\n".join(lines)

    __repr__ = __str__


_HEAD = ("trial", "ranks", "state", "value", "steps", "seconds", "parameters")


def _row(trial: optuna.trial.FrozenTrial) -> tuple[str, ...]:
    notes = trial.user_attrs
    words = _params(trial.params)
    if "retry_of" in notes:
        words += f"; again for {notes['retry_of']}"
    if "error" in notes:
        error = notes["error"].splitlines()[0]
        words += f"; {error[:ERROR_CHARACTERS]}{'...' if len(error) > ERROR_CHARACTERS else ''}"
    return (
        str(trial.number),
        notes.get("ranks", ""),
        trial.state.name.lower(),
        _number(trial.value),
        "" if trial.last_step is None else str(trial.last_step),
        f"{trial.duration.total_seconds():.1f}" if trial.duration else "",
        words,
    )


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str("" if value is None else value)


def _params(params: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_number(value)}" for name, value in params.items())


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
