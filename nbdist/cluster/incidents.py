"""What has befallen the ranks of a world while cells ran, and what was done (client)."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Incident", "note_incident", "read_incidents"]

_NAME = "incidents.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """The death of ranks in a cell that survives it.

    Attributes:
        at: wall-clock time at which the client knew of it, in seconds since 1970.
        deaths: how they ended, in words, by rank.
        outcome: "healed", "shrunk" (it goes on without these ranks), or why it could not go on, in
            words.
        freed_seconds: from then until the ranks that live had left what they waited in.
        replaced_seconds: until the new processes took cells.
        group_seconds: until the new process group was verified.
        seconds: until all ranks had their state back.
        step: the run went on after it; -1 when it did not.
        steps_lost: steps done again.
        source: where the state of the new ranks came from, in words.
        missing: the user's names that could not be given to the new ranks.
        num_ranks: ranks of the cell from then on.
    """

    at: float
    deaths: dict[int, str]
    outcome: str
    freed_seconds: float = 0.0
    replaced_seconds: float = 0.0
    group_seconds: float = 0.0
    seconds: float = 0.0
    step: int = -1
    steps_lost: int = 0
    source: str = ""
    missing: tuple[str, ...] = ()
    num_ranks: int = 0

    @property
    def is_healed(self) -> bool:
        """Whether the ranks were replaced."""
        return self.outcome == "healed"

    @property
    def is_survived(self) -> bool:
        """Whether the cell went on."""
        return self.outcome in ("healed", "shrunk")

    def in_words(self) -> str:
        """Return the incident as sentences."""
        who = "; ".join(f"rank {rank}: {how}" for rank, how in self.deaths.items())
        if not self.is_survived:
            return f"{who}; {self.outcome}"
        lost = f"{self.steps_lost} step{'s' * (self.steps_lost != 1)} done again"
        what = "replaced, all" if self.is_healed else f"left out, {self.num_ranks} ranks"
        text = (
            f"{who}; {what} go on after step {self.step} ({lost}), {self.seconds:.1f} s "
            f"after it was noticed; state from {self.source}"
        )
        if self.missing:
            text += f"; the new process lacks: {', '.join(self.missing)}"
        return text


def note_incident(directory: Path, incident: Incident) -> None:
    """Add an incident to the log of a world."""
    with (directory / _NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(incident)) + "\n")


def read_incidents(directory: Path, *, within_seconds: float | None = None) -> list[Incident]:
    """Return the incidents of a world, the oldest first; of the last seconds, if given."""
    path = directory / _NAME
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        fields["deaths"] = {int(rank): how for rank, how in fields["deaths"].items()}
        fields["missing"] = tuple(fields["missing"])
        found.append(Incident(**fields))
    if within_seconds is None:
        return found
    return [one for one in found if time.time() - one.at <= within_seconds]
