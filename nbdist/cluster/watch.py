"""Looks at the ranks of a running cell: who waits where, and for whom (client).

While a cell runs, the ranks' control threads are asked twice a second. A wait that cannot end is
an error; a wait that lasts is a note under the cell. Once a second a note says where the ranks are.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Set as AbstractSet

from nbdist.cluster.link import WorldLink
from nbdist.errors import CollectiveSubsetError, RankLostError
from nbdist.messages import CellNote, Message, RunCell, Where, WhereQuery

__all__ = ["Watch"]

FIRST_LOOK_SECONDS = 1.0
LOOK_SECONDS = 0.5
SUBSET_SECONDS = 2.0
SILENT_SECONDS = 10.0
NOTE_SECONDS = 5.0
STATUS_SECONDS = 1.0
MAX_LINES = 8


class Watch:
    """Watches one cell; `look` is called often and asks seldom.

    A collective that an idle rank of its group has not called will never end. Ranks outside the
    cell and ranks whose cell has ended are idle.

    Args:
        link: to the ranks.
        request: the cell.
        num_ranks: of the world.
    """

    def __init__(self, link: WorldLink, request: RunCell, num_ranks: int) -> None:
        self._link = link
        self._request = request
        self._num_ranks = num_ranks
        self._topic = f"where-{request.cell_id}"
        self._answers: dict[int, Where] = {}
        self._suspect: tuple[int, str, int] | None = None
        self._started = time.monotonic()
        self._look_at = self._started + FIRST_LOOK_SECONDS
        self._note_at = 0.0
        self._status_at = self._look_at
        self._noted = False
        self._silent = float(os.environ.get("NBDIST_SILENT_SECONDS", SILENT_SECONDS))
        link.listen(self._topic, self._take)

    def close(self) -> None:
        """Ask no more."""
        self._link.listen(self._topic, None)

    def look(self) -> Message | None:
        """Return a note when there is a new one to show.

        Raises:
            CollectiveSubsetError: a rank waits for a rank that is idle.
        """
        now = time.monotonic()
        if now < self._look_at:
            return None
        answers, self._answers = self._answers, {}
        self._look_at = now + LOOK_SECONDS
        for rank in sorted(set(range(self._num_ranks)) - self._link.lost_ranks):
            with contextlib.suppress(RankLostError):  # it has died since
                self._link.post(rank, WhereQuery(query_id=self._topic))
        waiting = [a for a in answers.values() if a.waits_in and self._runs(a)]
        self._judge(waiting, answers)
        return self._note(waiting, answers, now) or self._status(answers, now)

    def _take(self, rank: int, message: Message) -> None:
        if isinstance(message, Where):
            self._answers[rank] = message

    def _runs(self, answer: Where) -> bool:
        return answer.running_cell == self._request.cell_id

    def _judge(self, waiting: list[Where], answers: dict[int, Where]) -> None:
        """Raise when the same wait has been found hopeless at two looks in a row."""
        for wait in waiting:
            idle = tuple(r for r in wait.group_ranks if _never_calls(answers.get(r), wait))
            if wait.waited_seconds < SUBSET_SECONDS or not idle:
                continue
            suspect = (wait.rank, wait.group, wait.number)
            if suspect == self._suspect:
                raise CollectiveSubsetError(self._explain(wait, idle), ranks=idle)
            self._suspect = suspect
            return
        self._suspect = None

    def _explain(self, wait: Where, idle: tuple[int, ...]) -> str:
        outside = [rank for rank in idle if rank not in self._request.ranks]
        ended = [rank for rank in idle if rank in self._request.ranks]
        reasons = []
        if outside:
            reasons.append(f"rank {_list(outside)} runs no cell and never called it")
        if ended:
            reasons.append(f"rank {_list(ended)} has ended its cell without calling it")
        what = "run the cell on all ranks of the group" if outside else (
            "let every rank of the group make the call, outside of `if rank == ...`"
        )  # fmt: skip
        return (
            f"rank {wait.rank} waits in {wait.waits_in}{_at(wait)}, but {' and '.join(reasons)}: "
            f"it can never end and was stopped; {what}; variables are kept"
        )

    def _note(self, waiting: list[Where], answers: dict[int, Where], now: float) -> CellNote | None:
        if len(self._request.ranks) < 2 or not answers:
            return None
        longest = max((wait.waited_seconds for wait in waiting), default=0.0)
        if longest < self._silent:
            if not self._noted or waiting:
                return None
            self._noted = False
            return self._say("The ranks go on.")
        if self._noted and now - self._note_at < NOTE_SECONDS:
            return None
        self._noted, self._note_at = True, now
        lines = [f"Waiting for {longest:.0f} s; Stop frees the ranks, variables are kept."]
        ranks = self._request.ranks
        lines += [_place(rank, answers.get(rank), self._request.cell_id)
                  for rank in ranks[:MAX_LINES]]  # fmt: skip
        if len(ranks) > MAX_LINES:
            lines.append(f"  and {len(ranks) - MAX_LINES} more")
        return self._say("\n".join(lines))

    def _status(self, answers: dict[int, Where], now: float) -> CellNote | None:
        """Return one line that says how long the cell has run, and where the ranks are."""
        if self._noted or now - self._status_at < STATUS_SECONDS:
            return None
        self._status_at = now
        ranks_at: dict[str, list[int]] = {}
        for rank in self._request.ranks:
            ranks_at.setdefault(_brief(answers.get(rank), self._request), []).append(rank)
        places = []
        for text, ranks in ranks_at.items():
            who = f"rank{'s' * (len(ranks) > 1)} {_list(ranks)}"
            places.append(f"{who}: {text}" if text else who)
        if len(places) > MAX_LINES:
            places[MAX_LINES:] = [f"and {len(places) - MAX_LINES} more"]
        text = f"running {now - self._started:.0f} s: {'; '.join(places)}"
        return self._say(text, is_status=True)

    def _say(self, text: str, *, is_status: bool = False) -> CellNote:
        return CellNote(cell_id=self._request.cell_id, text=text, is_status=is_status)


def _never_calls(answer: Where | None, wait: Where) -> bool:
    """Return whether a rank is idle and has not made the call that is waited for."""
    if answer is None or answer.running_cell:
        return False
    return answer.counts.get(wait.group, 0) < wait.number


def _brief(answer: Where | None, request: RunCell) -> str:
    if answer is None:
        return ""
    if answer.running_cell != request.cell_id:
        return "done"
    if answer.asks:
        return "waits for your input"
    place = answer.line.removeprefix(f"Cell In[{request.execution_count}], ")
    return ", ".join(filter(None, [place, answer.waits_in and f"in {answer.waits_in}"]))


def _place(rank: int, answer: Where | None, cell_id: str) -> str:
    if answer is None:
        return f"  rank {rank}: does not answer"
    if answer.running_cell != cell_id:
        return f"  rank {rank}: has ended the cell"
    if answer.asks:
        return f"  rank {rank}: waits for your input{_at(answer)}"
    if answer.waits_in:
        return (
            f"  rank {rank}: in {answer.waits_in}, for {answer.waited_seconds:.0f} s{_at(answer)}"
        )
    return f"  rank {rank}: not in a collective{_at(answer)}"


def _at(answer: Where) -> str:
    return f", {answer.line}" if answer.line else ""


def _list(ranks: AbstractSet[int] | list[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
