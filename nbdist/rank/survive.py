"""Lets a rank's cell go on after another rank has died, or as the new rank in its place (rank).

What `nbdist.train.survival` needs of this layer: it names it in `SurvivalPort`.
"""

from __future__ import annotations

import ast
import logging
import queue
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nbdist.messages import AbortGroup, CanRecover, JoinGroup, Recovered, RunCell
from nbdist.rank.loading import begin_loading, end_loading
from nbdist.rank.namespace import user_names
from nbdist.rank.rejoin import call_site, joined_at, resumed_at

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.ports import PackedNames, Policy
    from nbdist.rank.executor import Executor
    from nbdist.rank.namespace import Namespace
    from nbdist.train.survival import NewRank

__all__ = ["Survivor", "begin", "go_on", "rejoining"]

log = logging.getLogger(__name__)

# gloo sees a death before the client does, whose word comes within milliseconds on an idle machine.
PATIENCE_SECONDS = 5.0
# An error that no backend has raised is most likely the user's own, and not to be held back.
BRIEF_SECONDS = 1.5
TICK_SECONDS = 0.05

_survivor: Survivor | None = None
_new_rank: NewRank | None = None


class Survivor:
    """This rank's `SurvivalPort`.

    Args:
        executor: of the rank's cells, and their events.
        namespace: the user's names.
        join: joins a generation of the group on the main thread; False when it failed.
    """

    def __init__(
        self,
        executor: Executor,
        namespace: Namespace,
        join: Callable[[JoinGroup], bool],
    ) -> None:
        global _survivor  # noqa: PLW0603 - one rank is one process
        self._executor = executor
        self._output = executor.output
        self._namespace = namespace
        self.namespace = namespace.names
        self._join = join
        self._inbox: queue.SimpleQueue[AbortGroup | JoinGroup] = queue.SimpleQueue()
        self._is_on = False
        self._missing: tuple[str, ...] = ()
        self._freed_at = 0.0
        executor.on_rejoin = self._rejoin
        _survivor = self

    def takes(self, message: AbortGroup | JoinGroup) -> bool:
        """Return whether the main thread, in a cell, takes care of a message (control thread)."""
        if self._is_on:
            self._inbox.put(message)
        return self._is_on

    def begin(self, policy: Policy) -> str:
        """See `SurvivalPort`."""
        call, problem = call_site(sys._getframe(1), self._executor.cell_numbers)
        if problem and policy.on_failure != "shrink":  # then nobody has to take it up
            return problem
        self._drain()
        self._freed_at = 0.0
        self._is_on = True
        self._output.event(
            CanRecover,
            on_failure=policy.on_failure,
            min_ranks=policy.min_ranks,
            multiple_of=policy.multiple_of,
            max_failures=policy.max_failures,
            per_hours=policy.per_hours,
            call=call,
        )
        return ""

    def end(self) -> None:
        """See `SurvivalPort`."""
        self._is_on = False
        self._output.event(CanRecover, on_failure="")

    def wait_for_group(self, error: BaseException) -> None:
        """See `SurvivalPort`."""
        self._freed_at = self._freed_at or time.time()
        patience = PATIENCE_SECONDS if _is_of_a_backend(error) else BRIEF_SECONDS
        deadline: float | None = time.monotonic() + patience
        while True:
            try:
                message = self._inbox.get(timeout=TICK_SECONDS)
            except queue.Empty:
                if deadline is not None and time.monotonic() > deadline:
                    raise error from None
                continue
            if isinstance(message, JoinGroup):
                if self._join(message):
                    return
            elif message.heals:
                # It may take as long as a process needs to start; the client ends it.
                deadline = None
            else:
                raise error

    def pack_names(self, known: dict[str, Any]) -> PackedNames:
        """See `SurvivalPort`."""
        from nbdist.train.survival.packing import pack

        packed: dict[str, bytes] = {}
        missing = []
        for name in user_names():
            if self._namespace.is_ours(name):
                continue
            try:
                packed[name] = pack(self.namespace[name], known)
            except Exception as error:  # noqa: BLE001 - whatever a user's object raises
                log.info("`%s` is not given to the new rank: %s", name, error)
                missing.append(name)
        return packed, tuple(missing)

    def unpack_names(self, packed: PackedNames, known: dict[str, Any]) -> tuple[str, ...]:
        """See `SurvivalPort`."""
        from nbdist.train.survival.packing import unpack

        values, missing = packed
        failed = list(missing)
        for name, one in values.items():
            try:
                value = unpack(one, known)
            except Exception as error:  # noqa: BLE001 - whatever a user's object raises
                log.info("`%s` cannot be taken from another rank: %s", name, error)
                failed.append(name)
            else:
                self.namespace[name] = value
        self._missing = tuple(failed)
        return self._missing

    def rebind(self, pairs: list[tuple[Any, Any]]) -> None:
        """See `SurvivalPort`."""
        new = {id(old): value for old, value in pairs}
        for name, value in list(self.namespace.items()):
            if id(value) in new and not self._namespace.is_ours(name):
                self.namespace[name] = new[id(value)]

    def recovered(self, *, step: int, steps_lost: int, source: str) -> None:
        """See `SurvivalPort`."""
        freed_at, self._freed_at = self._freed_at, 0.0
        self._output.event(
            Recovered,
            step=step,
            steps_lost=steps_lost,
            source=source,
            missing=self._missing,
            freed_at=freed_at,
        )

    def _rejoin(self, request: RunCell) -> None:
        """Get ready for a cell that others are in (control thread)."""
        del request
        self._drain()
        self._is_on = True

    def _drain(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()


def _is_of_a_backend(error: BaseException) -> bool:
    """Return whether a collective may have failed: a user's error holds none of these words."""
    causes = [error, error.__cause__, error.__context__]
    texts = [f"{type(cause).__name__} {cause}" for cause in causes if cause is not None]
    return any(word in text for text in texts for word in ("gloo", "NCCL", "Dist"))


@contextmanager
def rejoining(shell: InteractiveShell, request: RunCell) -> Iterator[None]:
    """Let the shell run of a cell only what is wanted of it: see `RunCell`."""
    transformers = list(shell.ast_transformers)
    if request.rejoin or request.resumes:
        shell.ast_transformers = [*transformers, _Rest(request)]
    try:
        yield
    finally:
        shell.ast_transformers = transformers


class _Rest(ast.NodeTransformer):
    """Leaves of a cell what is still to be run of it."""

    def __init__(self, request: RunCell) -> None:
        self._request = request

    def visit_Module(self, tree: ast.Module) -> ast.Module:
        """Return the rest of the cell."""
        joins, resumes = self._request.rejoin, self._request.resumes
        rest = joined_at(tree, joins) if joins else resumed_at(tree, resumes)
        assert rest is not None, "the ranks have looked"
        return rest


def begin() -> None:
    """Join the other ranks; the first statement of a new rank's cell."""
    global _new_rank  # noqa: PLW0603 - one rank is one process
    begin_loading()
    import torch._dynamo  # noqa: F401 - every optimizer does, with the collector on

    from nbdist.train.survival import NewRank

    end_loading()
    assert _survivor is not None, "set when the rank began to take cells"
    _new_rank = NewRank(_survivor)
    _new_rank.join()


def go_on() -> Any:
    """Return what the call that the other ranks are in returns."""
    global _new_rank
    new, _new_rank = _new_rank, None
    assert new is not None, "has joined before"
    return new.go_on()
