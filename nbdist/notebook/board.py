"""The progress bars of all ranks: equal ones are one line, in one place (client)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from nbdist.notebook.bars import Bar, merge

__all__ = ["Board", "BarKey"]

OPEN_SECONDS = 0.3
MAX_LINES = 20

BarKey = tuple[str, str, int]
"""Stream, name, and how many bars of that name the rank has ended before."""


@dataclass(slots=True)
class _Group:
    since: float
    changed: float
    states: dict[int, Bar] = field(default_factory=dict)
    going: set[int] = field(default_factory=set)
    is_shown: bool = False


class Board:
    """Knows every rank's bars. A bar that lasts a moment is shown; what is shown stays in place.

    Args:
        ranks: that run the cell.
        clock: seconds, monotonic.
    """

    def __init__(self, ranks: Iterable[int], clock: Callable[[], float] = time.monotonic) -> None:
        self._running = set(ranks)
        self._clock = clock
        self._groups: dict[BarKey, _Group] = {}
        self._ended: dict[tuple[int, str, str], int] = {}
        self._last: dict[tuple[int, str, str], float] = {}
        self._repeated: set[tuple[str, str]] = set()

    def draw(self, rank: int, stream: str, bars: list[Bar]) -> None:
        """Take in the bars that now stand at the end of a rank's text."""
        names = {bar.name for bar in bars}
        for key in [k for k, g in self._groups.items() if k[0] == stream and rank in g.going]:
            if key[1] not in names:
                self._drop(rank, key)
        for bar in bars:
            self._note_repeat(rank, stream, bar)
            group = self._set(rank, self._key(rank, stream, bar), bar)
            group.going.add(rank)

    def end_bar(self, rank: int, stream: str, bar: Bar) -> BarKey:
        """Take in the last state of a bar, which stays; return what names it on all ranks."""
        key = self._key(rank, stream, bar)
        group = self._set(rank, key, bar)
        group.going.discard(rank)
        place = (rank, stream, bar.name)
        self._ended[place] = self._ended.get(place, 0) + 1
        self._last.pop(place, None)
        return key

    def end_rank(self, rank: int) -> None:
        """Note that a rank draws nothing more."""
        self._running.discard(rank)
        for key in [k for k, g in self._groups.items() if rank in g.going]:
            self._drop(rank, key)

    def take_ended(self, key: BarKey, ranks: Iterable[int]) -> str | None:
        """Return the line of a bar that ranks have ended; None when it stands in place already."""
        group = self._groups.get(key)
        if group is None or group.is_shown:
            return None
        states = {rank: group.states.pop(rank) for rank in ranks if rank in group.states}
        if not group.states:
            del self._groups[key]
        return merge(states, ()) if states else None

    def lines(self) -> list[tuple[tuple[int, ...], str]]:
        """Return ranks and line of what to show in place now: the bars that have lasted a moment.

        Of very many only the last ones.
        """
        now = self._clock()
        for group in self._groups.values():
            if group.going and now - group.since >= OPEN_SECONDS:
                group.is_shown = True
        shown = [(key, group) for key, group in self._groups.items() if group.is_shown]
        return [self._line(key, group) for key, group in shown[-MAX_LINES:]]

    @property
    def is_going(self) -> bool:
        """Whether a bar that is shown is not at its end on every rank."""
        now = self._clock()
        return any(
            group.going
            or (self._running - set(group.states) and now - group.changed < OPEN_SECONDS)
            for group in self._groups.values()
            if group.is_shown
        )

    def close(self) -> None:
        """Forget the bars that are shown: their place keeps them as they are."""
        for key in [key for key, group in self._groups.items() if group.is_shown]:
            del self._groups[key]

    def _key(self, rank: int, stream: str, bar: Bar) -> BarKey:
        return stream, bar.name, self._ended.get((rank, stream, bar.name), 0)

    def _set(self, rank: int, key: BarKey, bar: Bar) -> _Group:
        now = self._clock()
        group = self._groups.setdefault(key, _Group(now, now))
        group.states[rank] = bar
        group.changed = now
        return group

    def _drop(self, rank: int, key: BarKey) -> None:
        """Forget a bar that was wiped out."""
        group = self._groups[key]
        group.going.discard(rank)
        group.states.pop(rank, None)
        if not group.states:
            del self._groups[key]

    def _note_repeat(self, rank: int, stream: str, bar: Bar) -> None:
        place = (rank, stream, bar.name)
        if bar.done < self._last.get(place, 0.0):
            # It began anew, and may have elsewhere: how far it is does not tell who is behind.
            self._repeated.add((stream, bar.name))
        self._last[place] = bar.done

    def _line(self, key: BarKey, group: _Group) -> tuple[tuple[int, ...], str]:
        is_repeated = key[:2] in self._repeated
        text = merge(group.states, group.going, name_slowest=not is_repeated)
        return tuple(sorted(group.states)), text
