"""The names on the ranks as a table, in a notebook and in print (client)."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass, field

from nbdist.messages import NameRow

__all__ = ["NamesTable"]

HEADINGS = ("name", "ranks", "type", "shape", "dtype", "device", "size", "differs")


@dataclass(frozen=True, slots=True)
class NamesTable:
    """The names that the user has made on the ranks.

    Attributes:
        rows: what each rank says of a name, `{name: {rank: row}}`.
        ranks: that have answered.
        busy: ranks that run a cell, by rank the cell's id; nothing is known of their names.
        silent: ranks that are gone or did not answer.
    """

    rows: dict[str, dict[int, NameRow]] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    busy: dict[int, str] = field(default_factory=dict)
    silent: tuple[int, ...] = ()

    def differs(self, name: str) -> bool | None:
        """Return whether ranks hold different values; None when they were not compared.

        A name that some of the ranks lack differs.
        """
        found = self.rows[name]
        rows = list(found.values())
        facts = {(row.type_name, row.dtype, row.placements) for row in rows}
        if len(rows) < len(self.ranks) or len(facts) > 1:
            return True
        if len(rows) < 2 or any(not row.digest for row in rows):
            return None
        return len({row.digest for row in rows}) > 1

    def is_sampled(self, name: str) -> bool:
        """Return whether the comparison covers only a sample and the sum."""
        return any(row.is_sampled for row in self.rows[name].values())

    def bundle(self) -> dict[str, str]:
        """Return the table as text and as HTML, by mime type."""
        rows, notes = _rows(self), _notes(self)
        shown = _html(rows) if rows else ""
        return {
            "text/plain": "\n".join([*(_text(rows) if rows else []), *notes]),
            "text/html": shown + "".join(f"<div>{html.escape(note)}</div>" for note in notes),
        }

    def _repr_mimebundle_(self, **_wanted: object) -> dict[str, str]:
        return self.bundle()

    def __str__(self) -> str:
        return self.bundle()["text/plain"]


def _text(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in [HEADINGS, *rows]) for i in range(len(HEADINGS))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in [HEADINGS, *rows]
    ]


def _html(rows: list[tuple[str, ...]]) -> str:
    style = "style='text-align:left'"
    head = "".join(f"<th {style}>{name}</th>" for name in HEADINGS)
    body = "".join(
        "<tr>" + "".join(f"<td {style}>{html.escape(text)}</td>" for text in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _rows(table: NamesTable) -> list[tuple[str, ...]]:
    """Return the cells of the table, a row a name; what differs is given rank by rank."""
    return [
        (
            name,
            _spans(tuple(by_rank)),
            _each(by_rank, lambda row: row.type_name),
            _each(by_rank, _shape),
            _each(by_rank, lambda row: row.dtype),
            _each(by_rank, lambda row: row.device),
            _each(by_rank, lambda row: _size(row.num_bytes)),
            _verdict(table, name),
        )
        for name, by_rank in table.rows.items()
    ]


def _notes(table: NamesTable) -> list[str]:
    """Return lines that say what the table does not show."""
    notes = []
    if table.ranks and not table.rows:
        notes.append(f"rank {_spans(table.ranks)}: no such names")
    notes += [
        f"rank {rank} is busy with cell {cell_id[:8]}; ask again when it is done"
        for rank, cell_id in sorted(table.busy.items())
    ]
    notes += [f"rank {rank} is gone or did not answer" for rank in table.silent]
    return notes


def _verdict(table: NamesTable, name: str) -> str:
    differs = table.differs(name)
    if differs is None:
        is_sharded = any(row.placements for row in table.rows[name].values())
        return "sharded" if is_sharded else "-"
    if differs:
        return "yes"
    return "no (sample and sum)" if table.is_sampled(name) else "no"


def _shape(row: NameRow) -> str:
    return f"{row.shape} {row.placements}".strip()


def _each(by_rank: dict[int, NameRow], read: Callable[[NameRow], str]) -> str:
    """Return what all ranks agree on, else every rank's own behind its number."""
    found: dict[str, list[int]] = {}
    for rank, row in by_rank.items():
        found.setdefault(read(row), []).append(rank)
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"[{_spans(tuple(ranks))}] {text or '-'}" for text, ranks in found.items())


def _spans(ranks: tuple[int, ...]) -> str:
    """Return ranks as `0-2,5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _size(num_bytes: int) -> str:
    if not num_bytes:
        return ""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
