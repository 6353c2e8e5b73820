"""Answers what the names on a rank are: completion, inspection, the list of names (rank).

An idle rank answers from IPython, on the main thread like any code of the user. While a cell
runs the control thread answers from `rank/glance.py`, which runs no code of the user.
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import types
from collections.abc import Callable
from typing import Any

from nbdist.messages import (
    CompleteQuery,
    InspectQuery,
    Message,
    NameRow,
    NamesAnswer,
    NamesQuery,
)
from nbdist.rank import glance
from nbdist.rank.describe import describe
from nbdist.rank.executor import Executor
from nbdist.rank.link import RankLink

__all__ = ["NameService"]

log = logging.getLogger(__name__)
NOTHING: dict[str, Any] = {"status": "ok"}


class NameService:
    """Takes the queries of `nbdist.messages.names` from the link.

    Must be made on the main thread inside the running event loop.

    Args:
        kernel: the engine's kernel.
        link: where queries come from.
        executor: says whether a cell runs.
        is_ours: says of a name whether it holds what nbdist has put there.
    """

    def __init__(
        self, kernel: Any, link: RankLink, executor: Executor, is_ours: Callable[[str], bool]
    ) -> None:
        self._kernel = kernel
        self._link = link
        self._executor = executor
        self._is_ours = is_ours
        self._loop = asyncio.get_running_loop()
        # Live objects answer in milliseconds; jedi's first look at torch takes seconds.
        kernel.shell.Completer.use_jedi = False
        for kind in (CompleteQuery, InspectQuery, NamesQuery):
            link.on_message(kind, self._take)

    def _take(self, message: Message) -> None:
        """Answer at once when a cell runs, else soon on the main thread (control thread)."""
        if cell_id := self._executor.running_cell:
            self._answer(message, cell_id, self._glance)
        else:
            self._loop.call_soon_threadsafe(self._answer, message, "", self._look)

    def _answer(
        self, message: Message, busy: str, find: Callable[[Message], dict[str, Any]]
    ) -> None:
        try:
            found = find(message)
        except Exception:
            # Any attribute or repr of the user's may fail: the question has no answer then.
            log.exception("rank %d cannot answer a %s", self._link.rank, message.kind)
            found = {"reply": NOTHING}
        query_id = getattr(message, "query_id", "")
        self._link.emit(NamesAnswer(rank=self._link.rank, query_id=query_id, busy=busy, **found))

    def _look(self, message: Message) -> dict[str, Any]:
        if isinstance(message, CompleteQuery):
            return {"reply": self._kernel.do_complete(message.source, message.cursor)}
        if isinstance(message, InspectQuery):
            reply = self._kernel.do_inspect(message.source, message.cursor, message.detail)
            return {"reply": reply}
        assert isinstance(message, NamesQuery), message
        return {"rows": self._rows(message.pattern or "*")}

    def _glance(self, message: Message) -> dict[str, Any]:
        names = self._kernel.shell.user_ns
        if isinstance(message, CompleteQuery):
            return {"reply": glance.complete(names, message.source, message.cursor)}
        if isinstance(message, InspectQuery):
            return {"reply": glance.inspect(names, message.source, message.cursor)}
        return {}

    def _rows(self, pattern: str) -> tuple[NameRow, ...]:
        shell = self._kernel.shell
        unset = object()
        return tuple(
            describe(name, value)
            for name, value in sorted(shell.user_ns.items())
            if fnmatch.fnmatchcase(name, pattern)
            and not name.startswith("_")
            and not isinstance(value, types.ModuleType)
            and value is not shell.user_ns_hidden.get(name, unset)
            and not self._is_ours(name)
        )
