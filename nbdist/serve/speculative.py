"""Guessing tokens ahead and checking them all in one step, for many rows at a time (rank).

A guess is one certain token (the proposal puts all its mass there), so the standard rule, accept
with probability min(1, p / q) and else draw from what p has left (arXiv 2211.17192), comes to this:
draw from p as if nothing had been guessed, and go on while the draw is the guess. Answers are
therefore those without speculation: the same tokens when greedy, and also for a seed when sampled.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from nbdist.serve.pacing import Pace, RowPace

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.serve.sequence import Sequence

__all__ = ["NGramProposer", "Proposer", "Speculation"]


class Proposer(Protocol):
    """Guesses what comes next."""

    def propose(self, rows: list[Sequence], sizes: list[int]) -> list[list[int]]:
        """Return at most `sizes[i]` tokens that may follow `rows[i].token_ids`."""
        ...

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        ...


class NGramProposer:
    """Guesses that what followed the newest tokens earlier in a row follows them again.

    Args:
        longest: number of newest tokens that are looked for first.
        shortest: the least that are.
    """

    def __init__(self, *, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"shortest={shortest}, longest={longest}: set 1 <= shortest <= longest"
            )
        self._sizes = range(longest, shortest - 1, -1)
        self._seen: dict[str, tuple[int, dict[tuple[int, ...], int]]] = {}

    def propose(self, rows: list[Sequence], sizes: list[int]) -> list[list[int]]:
        """See `Proposer.propose`."""
        return [self._one(row, size) for row, size in zip(rows, sizes, strict=True)]

    def forget(self, request_id: str) -> None:
        """See `Proposer.forget`."""
        self._seen.pop(request_id, None)

    def _one(self, row: Sequence, size: int) -> list[int]:
        ids = row.token_ids
        done, after = self._seen.get(row.request_id, (1, {}))
        for end in range(done, len(ids)):  # the newest tokens themselves are left out
            for n in self._sizes:
                if n <= end:
                    after[tuple(ids[end - n : end])] = end
        self._seen[row.request_id] = (len(ids), after)
        for n in self._sizes:
            if n < len(ids) and (at := after.get(tuple(ids[-n:]))) is not None:
                return ids[at : at + size]
        return []


class Speculation:
    """Drafts for the rows of an engine, as many as pay.

    Args:
        proposer: makes the guesses.
        max_draft: most guesses a row and step.
        clock: seconds.
    """

    def __init__(
        self,
        proposer: Proposer,
        *,
        max_draft: int = 4,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.pace = Pace(max_draft)
        self._proposer = proposer
        self._clock = clock
        self._rows: dict[str, RowPace] = {}

    def draft(self, rows: list[Sequence], rooms: list[int]) -> None:
        """Set the draft of each row that decodes; `rooms[i]` tokens may still be made."""
        chosen, sizes = [], []
        for row, room in zip(rows, rooms, strict=True):
            pace = self._rows.setdefault(row.request_id, self.pace.row())
            size = min(self.pace.choose(pace, len(rows)), room - 1)
            row.draft = []
            if size > 0:
                chosen.append(row)
                sizes.append(size)
        if not chosen:
            return
        began = self._clock()
        drafts = self._proposer.propose(chosen, sizes)
        self.pace.note_draft(sum(map(len, drafts)), self._clock() - began)
        for row, draft in zip(chosen, drafts, strict=True):
            row.draft = draft

    def note(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Learn from a row whose draft was checked."""
        pace = self._rows.setdefault(request_id, self.pace.row())
        self.pace.note_row(pace, num_drafted, num_accepted)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._rows.pop(request_id, None)
        self._proposer.forget(request_id)
