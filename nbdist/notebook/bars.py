"""Progress bars, known by their text: those of all ranks are one bar (client)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

__all__ = ["Bar", "parse", "merge"]

MAX_BAR_CHARS = 1000
_HEAVY = "\u2501"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"\d+(?:\.\d+)?(?:[kMGTPE]i?)?"
# tqdm: `desc:  45%|####5     | 45/100 [00:02<00:02, 22.1it/s, loss=1]`, or without a total
# `desc: 45it [00:02, 22.1it/s]`.
_TQDM = re.compile(
    rf"(?:(?P<desc>[^\n]*?): )?\s*(?:\d+%\|[^|\n]*\|\s*)(?P<done>{_NUMBER})[a-zA-Z]*/"
    rf"(?P<total>{_NUMBER}|\?)\S*\s+\[(?P<elapsed>[\d:]+)<(?P<tail>[^\]\n]*)\]"
)
_TQDM_OPEN = re.compile(
    r"(?:(?P<desc>[^\n]*?): )?(?P<done>\d+(?:\.\d+)?[kMGTPE]?)\s?(?P<unit>[a-zA-Z]+) "
    r"\[(?P<elapsed>\d+:\d\d(?::\d\d)?), (?P<tail>[^\]\n]*)\]"
)
# rich: `Working... -----+----  45% 0:00:03` of heavy lines (U+2501), colours taken out.
_RICH = re.compile(
    r"(?P<desc>[^\n\u2500-\u257f]*?)\s*[\u2500-\u257f ]*[\u2500-\u257f]{5}[\u2500-\u257f ]*\s"
    r"(?P<done>\d+)%(?P<tail>[ \d:.\-/a-zA-Z]*)"
)
_RATE = re.compile(rf"({_NUMBER})\s?([a-zA-Z]*)/(\w+)")
_POWERS = ["", "k", "M", "G", "T", "P", "E"]


@dataclass(frozen=True, slots=True)
class Bar:
    """One state of a progress bar.

    Attributes:
        line: as it was drawn.
        name: description and total; bars of the same name are the same bar on many ranks.
        done: how far it is; `done_text` as drawn.
        elapsed: seconds since its begin.
        per_second: its speed; 0 when not known.
        is_complete: it has come to its total.
        rest: text that was written after it in the same row.
    """

    line: str
    name: str
    done: float
    done_text: str
    elapsed: float = 0.0
    per_second: float = 0.0
    is_complete: bool = False
    rest: str = ""


def parse(row: str) -> Bar | None:
    """Return the bar that a row begins with, if any."""
    if ("[" not in row and _HEAVY not in row) or len(row) > MAX_BAR_CHARS:
        return None
    if _HEAVY in row:
        return _parse_rich(row)
    plain = _COLOUR.sub("", row) if "\x1b" in row else row
    found = _TQDM.match(plain) or _TQDM_OPEN.match(plain)
    if found is None:
        return None
    parts = found.groupdict()
    total = parts.get("total") or "?"
    return Bar(
        line=plain[: found.end()],
        name=f"{(parts['desc'] or '').strip()}|{total}|{parts.get('unit') or ''}",
        done=_value(parts["done"]),
        done_text=parts["done"],
        elapsed=_seconds(parts["elapsed"]),
        per_second=_speed(parts["tail"]),
        is_complete=parts["done"] == total,
        rest=plain[found.end() :].strip(),
    )


def _parse_rich(row: str) -> Bar | None:
    plain = _COLOUR.sub("", row)
    found = _RICH.match(plain)
    if found is None or plain[found.end() :].strip():
        return None
    done = found["done"]
    return Bar(
        line=plain.rstrip(),
        name=f"{found['desc'].strip()}|%|rich",
        done=float(done),
        done_text=f"{done}%",
        # Not drawn: as if it took five seconds in all.
        per_second=20.0,
        is_complete=done == "100",
    )


def merge(states: Mapping[int, Bar], going: Collection[int], *, name_slowest: bool = True) -> str:
    """Return the one line for the states of a bar on its ranks.

    It is the bar of the rank that is furthest. The slowest is named when it is behind by more
    than one step and by more than half a second's work: less is only when they were last drawn.
    Once all ranks have ended theirs it is that of the rank that took longest.

    Args:
        states: by rank.
        going: ranks whose bar has not ended.
        name_slowest: whether to name it at all.
    """
    if not going:
        return max(states.values(), key=lambda bar: (-bar.done, bar.elapsed)).line
    leader = max(states, key=lambda rank: states[rank].done)
    slowest = min(states, key=lambda rank: states[rank].done)
    first = states[leader]
    slack = max(1.0, first.per_second / 2 if leader in going else 0.0)
    if not name_slowest or first.done - states[slowest].done <= slack:
        return first.line
    return f"{first.line}  slowest: rank {slowest} at {states[slowest].done_text}"


def _value(text: str) -> float:
    number = re.match(r"[\d.]+", text)
    assert number is not None, text
    scale = text[number.end() :]
    power = _POWERS.index(scale[:1])
    return float(number.group()) * (1024.0 if scale.endswith("i") else 1000.0) ** power


def _seconds(text: str) -> float:
    seconds = 0.0
    for part in text.split(":"):
        seconds = seconds * 60 + float(part or 0)
    return seconds


def _speed(text: str) -> float:
    """Return steps a second from `22.1it/s` or `1.5s/it`; 0 when it is not known."""
    found = _RATE.search(text)
    if found is None:
        return 0.0
    value = _value(found[1])
    if found[3] == "s":
        return value
    return 1.0 / value if found[2] == "s" and value else 0.0
