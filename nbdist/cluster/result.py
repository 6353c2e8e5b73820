"""What a cell gave back (client)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nbdist.messages import Message, RankDisplay, RankDone, RanksChanged, RankStream

__all__ = ["CellResult"]


@dataclass(slots=True)
class CellResult:
    """What a cell gave back, by rank.

    Attributes:
        text: what the rank wrote to stdout and stderr, up to its limit.
        displays: contents of the rank's Jupyter display messages, in order.
        seconds: how long the cell ran on the rank.
    """

    text: dict[int, str]
    displays: dict[int, list[dict[str, Any]]]
    seconds: dict[int, float] = field(default_factory=dict)
    _pieces: dict[int, list[str]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, ranks: Sequence[int]) -> CellResult:
        """Return an empty result of these ranks."""
        return cls(text=dict.fromkeys(ranks, ""), displays={rank: [] for rank in ranks})

    def add(self, event: Message) -> None:
        """Take in one event of the cell."""
        if isinstance(event, RankStream):
            pieces = self._pieces.setdefault(event.rank, [])
            if event.left_out:
                pieces.append(f"\n... {event.left_out} characters are only in the rank's log ...\n")
            pieces.append(event.text)
            if event.rank in self.seconds:
                self._join(event.rank)
        elif isinstance(event, RankDisplay):
            self.displays[event.rank].append(event.content)
        elif isinstance(event, RankDone):
            self.seconds[event.rank] = event.seconds
            self._join(event.rank)
        elif isinstance(event, RanksChanged):
            for rank in event.ranks:
                self.text.setdefault(rank, "")
                self.displays.setdefault(rank, [])
            for rank in set(self._pieces):
                self._join(rank)

    def _join(self, rank: int) -> None:
        self.text[rank] += "".join(self._pieces.pop(rank, []))
