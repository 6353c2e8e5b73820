"""Cache memory of two layouts side by side, as text (client; torch-free).

A token takes t = 2 * layers * key heads * head size * bytes of a number. Contiguous slots reserve
t * context * rows, whatever the rows hold; blocks reserve t * ceil(length / block) * block a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.messages import EngineStats

__all__ = ["memory_line", "memory_table"]


def memory_table(stats: dict[int, EngineStats]) -> str:
    """Return a line a rank: bytes in use, and what both layouts reserve for it and waste.

    Args:
        stats: of each rank's engine, from `Router.stats`.
    """
    head = ("rank", "rows", "tokens' bytes", "shared", "paged", "wasted", "contiguous", "wasted")
    lines = [head]
    for rank, one in sorted(stats.items()):
        lines.append(
            (
                str(rank),
                str(one.num_running),
                _bytes(one.used_bytes),
                _bytes(one.shared_bytes),
                f"{_bytes(one.paged_bytes)} of {_bytes(one.capacity_bytes)}",
                f"{one.paged_waste_fraction:.0%}",
                _bytes(one.contiguous_bytes),
                f"{one.contiguous_waste_fraction:.0%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def memory_line(stats: dict[int, EngineStats]) -> str:
    """Return the caches of all ranks together in one line; empty when no engine tells of one.

    Args:
        stats: of each rank's engine, from `Router.stats`.
    """
    capacity = sum(one.capacity_bytes for one in stats.values())
    if not capacity:
        return ""
    stored = sum(one.used_bytes - one.shared_bytes for one in stats.values())
    paged = sum(one.paged_bytes for one in stats.values())
    contiguous = sum(one.contiguous_bytes for one in stats.values())
    used = sum(one.used_bytes for one in stats.values())
    return (
        f"cache: {_bytes(stored)} in use; paged {_bytes(paged)} of {_bytes(capacity)}, "
        f"{_waste(stored, paged)} wasted; contiguous {_bytes(contiguous)}, "
        f"{_waste(used, contiguous)} wasted"
    )


def _waste(stored: int, reserved: int) -> str:
    return f"{1 - stored / reserved:.0%}" if reserved else "0%"


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
