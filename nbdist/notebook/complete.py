"""Tab and Shift-Tab in cells that run on the ranks are answered by a rank (client)."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import Any

from nbdist.cluster.names import ask_names
from nbdist.cluster.source import check_ranks
from nbdist.errors import NbdistError
from nbdist.messages import CompleteQuery, InspectQuery
from nbdist.notebook.auto import AutoMode
from nbdist.notebook.session import current_world

__all__ = ["RankNames", "split_cell"]

ANSWER_SECONDS = 0.5
HEADER = re.compile(r"\s*%%distributed(?![\w?])[^\n]*\n")
MAGIC = re.compile(r"\s*%\S*")  # not yet clear whose magic it will be
RANKS = re.compile(r"(?:-r|--ranks)[ =]*(\S+)")
TYPES = "_jupyter_types_experimental"  # ipykernel's completions with their types


def split_cell(code: str, cursor: int, auto_mode: AutoMode) -> tuple[str, int] | None:
    """Return header and length of what precedes the source that runs on the ranks.

    None when the cursor is in text that runs, or is read, in the notebook's own process.
    """
    if header := HEADER.match(code):
        return (header.group(), header.end()) if cursor >= header.end() else None
    names_a_magic = MAGIC.fullmatch(code, 0, cursor)
    if names_a_magic or not auto_mode.runs_on_ranks(code.splitlines()):
        return None
    return "", 0


class RankNames:
    """Replaces `do_complete` and `do_inspect` of a kernel; takes nothing into the namespace.

    Args:
        shell: the notebook's shell; one without a kernel is left alone.
        auto_mode: says which cells without a header run on the ranks.
    """

    def __init__(self, shell: Any, auto_mode: AutoMode) -> None:
        self._kernel = getattr(shell, "kernel", None)
        self._auto_mode = auto_mode
        if self._kernel is not None:
            self._complete_here: Callable[..., Any] = self._kernel.do_complete
            self._inspect_here: Callable[..., Any] = self._kernel.do_inspect
            self._kernel.do_complete = self.complete
            self._kernel.do_inspect = self.inspect

    def remove(self) -> None:
        """Give the kernel its own methods back."""
        if self._kernel is not None:
            self._kernel.do_complete = self._complete_here
            self._kernel.do_inspect = self._inspect_here

    def complete(self, code: str, cursor_pos: int | None) -> Any:
        """Return the content of a `complete_reply`, or an awaitable of it."""
        cursor = len(code) if cursor_pos is None else cursor_pos
        place = split_cell(code, cursor, self._auto_mode)
        if place is None:
            return self._complete_here(code, cursor_pos)
        header, start = place
        query = CompleteQuery(query_id=uuid.uuid4().hex, source=code[start:], cursor=cursor - start)
        reply = _ask(query, header)
        if "matches" not in reply:
            return {
                "status": "ok",
                "matches": [],
                "cursor_start": cursor,
                "cursor_end": cursor,
                "metadata": {},
            }
        return _moved(reply, start)

    def inspect(
        self,
        code: str,
        cursor_pos: int,
        detail_level: int = 0,
        omit_sections: tuple[str, ...] | set[str] = (),
    ) -> Any:
        """Return the content of an `inspect_reply`, or an awaitable of it."""
        place = split_cell(code, cursor_pos, self._auto_mode)
        if place is None:
            return self._inspect_here(code, cursor_pos, detail_level, omit_sections)
        header, start = place
        query = InspectQuery(
            query_id=uuid.uuid4().hex,
            source=code[start:],
            cursor=cursor_pos - start,
            detail=detail_level,
        )
        reply = _ask(query, header)
        if "found" in reply:
            return reply
        return {"status": "ok", "found": False, "data": {}, "metadata": {}}


def _ask(query: CompleteQuery | InspectQuery, header: str) -> dict[str, Any]:
    """Return the answer of the first living rank that the cell runs on; empty without one."""
    wanted = RANKS.search(header)
    try:
        world = current_world()
        ranks = check_ranks(wanted.group(1) if wanted else None, world.num_ranks)
        living = [rank for rank in ranks if rank not in world.lost_ranks][:1]
        answers = ask_names(world, query, living, ANSWER_SECONDS)
    except (NbdistError, ValueError):
        # A half-typed list of ranks, or no world yet: the cell itself will say so when it runs.
        return {}
    return next((answer.reply for answer in answers.values()), {})


def _moved(reply: dict[str, Any], start: int) -> dict[str, Any]:
    """Return a `complete_reply` whose positions count from the beginning of the whole cell."""
    metadata = dict(reply.get("metadata", {}))
    if TYPES in metadata:
        metadata[TYPES] = [
            {**found, "start": found["start"] + start, "end": found["end"] + start}
            for found in metadata[TYPES]
        ]
    return {
        **reply,
        "cursor_start": reply["cursor_start"] + start,
        "cursor_end": reply["cursor_end"] + start,
        "metadata": metadata,
    }
