"""Makes one error of what the ranks of a cell have raised (client)."""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.errors import RemoteCellError
from nbdist.messages import RankError

__all__ = ["remote_error"]


def remote_error(errors: Sequence[RankError]) -> RemoteCellError:
    """Return the error of a cell: the first one, with how the other ranks ended.

    Args:
        errors: in the order in which they were raised.
    """
    cause = errors[0]
    others = {e.rank: _after(e) for e in errors if e.rank != cause.rank}
    return RemoteCellError(
        cause.rank, cause.name, cause.value, cause.traceback, others, hint=cause.hint
    )


def _after(error: RankError) -> str:
    """Return in words how a rank ended after another one had failed."""
    stopped = error.name in ("KeyboardInterrupt", "CancelledError")
    return "was stopped" if stopped else f"raised {error.name}: {error.value.splitlines()[0]}"
