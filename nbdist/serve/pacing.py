"""How many tokens to guess ahead: what a guess is worth against what it costs (anywhere).

One more guess of a row costs the step the time of one more token. It is worth the chance that it
holds, times the time that a token costs without guessing. A busy step makes tokens cheaply, so
guesses stop paying; a lone row waits a whole forward for each token, so they pay for longer.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Pace", "RowPace"]

_KEEP = 0.98  # share of the past that a new step leaves
_PRIOR_SLOPE = 0.05  # cost of a token over that of an empty step, until steps have been seen
_ROW_WEIGHT = 0.2
_ALL_WEIGHT = 0.05
_PROBE_EVERY = 32


@dataclass(slots=True)
class RowPace:
    """How well one row is guessed.

    Attributes:
        acceptance: chance that a guess holds when all before it did.
        num_silent: steps without a guess since the last one.
    """

    acceptance: float
    num_silent: int = 0


class Pace:
    """Chooses the number of guesses from acceptance and load.

    Args:
        max_draft: most guesses a row.
        acceptance: what is believed before anything was guessed.
    """

    def __init__(self, max_draft: int, *, acceptance: float = 0.6) -> None:
        if max_draft < 1:
            raise ValueError(f"max_draft={max_draft} guesses nothing; set at least 1")
        self.max_draft = max_draft
        self.acceptance = acceptance
        self.num_drafted = 0
        self.num_accepted = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._draft_seconds = 0.0

    def row(self) -> RowPace:
        """Return the pace of a new row, which begins with what all rows showed."""
        return RowPace(self.acceptance)

    def choose(self, row: RowPace, num_rows: int) -> int:
        """Return how many tokens to guess for a row in a step of `num_rows` rows."""
        start, slope = self._cost()
        worth = start / num_rows + slope
        price = slope + self._draft_seconds
        chance, chosen = row.acceptance, 0
        while chosen < self.max_draft and chance * worth > price:
            chosen += 1
            chance *= row.acceptance
        row.num_silent = 0 if chosen else row.num_silent + 1
        if row.num_silent >= _PROBE_EVERY:  # the text may have changed its kind
            row.num_silent = 0
            return 1
        return chosen

    def note_row(self, row: RowPace, num_drafted: int, num_accepted: int) -> None:
        """Learn from a row whose guesses were checked."""
        if not num_drafted:
            return
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        tried = num_accepted + (num_accepted < num_drafted)
        seen = num_accepted / tried
        row.acceptance += _ROW_WEIGHT * (seen - row.acceptance)
        self.acceptance += _ALL_WEIGHT * (seen - self.acceptance)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Learn what a step of so many tokens costs; only from steps that read no prompt."""
        for name, value in (
            ("_weight", 1.0),
            ("_x", num_tokens),
            ("_y", seconds),
            ("_xx", num_tokens**2),
            ("_xy", num_tokens * seconds),
        ):
            setattr(self, name, _KEEP * getattr(self, name) + value)

    def note_draft(self, num_tokens: int, seconds: float) -> None:
        """Learn what making guesses costs."""
        if num_tokens:
            new = seconds / num_tokens
            old = self._draft_seconds or new
            self._draft_seconds = old + _ROW_WEIGHT * (new - old)

    def _cost(self) -> tuple[float, float]:
        """Return the seconds of an empty step and of each token, by least squares."""
        if self._weight < 1:
            return 1.0, _PRIOR_SLOPE
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x**2
        guess = mean_y / (1 / _PRIOR_SLOPE + mean_x)
        if spread < 0.25:  # all steps had one size: nothing is known of the slope
            return guess / _PRIOR_SLOPE, guess
        slope = (self._xy / self._weight - mean_x * mean_y) / spread
        slope = min(max(slope, guess / 10), mean_y / mean_x)
        return mean_y - slope * mean_x, slope
