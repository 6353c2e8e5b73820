"""What a rank has written, read from its log (client)."""

from __future__ import annotations

from pathlib import Path

__all__ = ["read_log"]

MAX_CHARS = 20_000_000


def read_log(directory: Path, rank: int, tail: int = 0) -> str:
    """Return a rank's log under a heading, whole up to its last 20 million characters.

    Args:
        directory: the world's.
        rank: whose log.
        tail: only so many lines; 0 for all.
    """
    path = directory / "logs" / f"rank-{rank}.log"
    text = path.read_text(errors="replace")
    if (older := path.with_name(path.name + ".1")).exists() and len(text) < MAX_CHARS:
        text = older.read_text(errors="replace") + text
    heading = f"--- rank {rank} ---"
    if len(text) > MAX_CHARS and not tail:
        heading += f" the last {MAX_CHARS:,} of {len(text):,} characters; all: {path}"
        text = text[-MAX_CHARS:]
    return "\n".join([heading, *text.splitlines()[-tail:]])
