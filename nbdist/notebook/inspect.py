"""The names on the ranks as a table: `%distributed who` (client)."""

from __future__ import annotations

import html
from collections.abc import Callable

from nbdist.cluster.names import NamesTable
from nbdist.messages import NameRow

__all__ = ["bundle_of", "rows_of", "notes_of"]

HEADINGS = ("name", "ranks", "type", "shape", "dtype", "device", "size", "differs")


def bundle_of(table: NamesTable) -> dict[str, str]:
    """Return the mime bundle of a table of names, as text and as HTML."""
    rows, notes = rows_of(table), notes_of(table)
    widths = [max(len(row[i]) for row in [HEADINGS, *rows]) for i in range(len(HEADINGS))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in ([HEADINGS, *rows] if rows else [])
    ]
    style = "style='text-align:left'"
    head = "".join(f"<th {style}>{name}</th>" for name in HEADINGS)
    body = "".join(
        "<tr>" + "".join(f"<td {style}>{html.escape(text)}</td>" for text in row) + "</tr>"
        for row in rows
    )
    shown = f"<table><tr>{head}</tr>{body}</table>" if rows else ""
    return {
        "text/plain": "\n".join([*lines, *notes]),
        "text/html": shown + "".join(f"<div>{html.escape(note)}</div>" for note in notes),
    }


def rows_of(table: NamesTable) -> list[tuple[str, ...]]:
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


def notes_of(table: NamesTable) -> list[str]:
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
