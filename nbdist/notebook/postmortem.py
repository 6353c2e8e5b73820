"""Which rank `%distributed debug` looks at (client)."""

from __future__ import annotations

from nbdist.cluster.world import World
from nbdist.errors import NbdistError, RankBusyError

__all__ = ["SOURCE", "choose_rank"]

SOURCE = "%debug"


def choose_rank(world: World, rank: int | None) -> int:
    """Return the rank whose last failure is to be looked at.

    Args:
        world: with the ranks.
        rank: the wanted one; None takes the rank that failed first.

    Raises:
        RankBusyError: the rank runs a cell.
        NbdistError: the rank keeps no failure; names the ranks that do.
    """
    infos = {info.rank: info for info in world.status()}
    failed = sorted(
        (info for info in infos.values() if info.failure), key=lambda info: info.failed_at_seconds
    )
    if rank is None and failed:
        return failed[0].rank
    asked = "%distributed debug" + ("" if rank is None else f" -r {rank}")
    if rank in infos and infos[rank].running_cell:
        raise RankBusyError(
            f"`{asked}`: rank {rank} runs a cell; wait for it, or `%distributed interrupt`"
        )
    if rank in world.lost_ranks or rank in {info.rank for info in failed}:
        assert rank is not None, "it is a rank's number"
        return rank
    others = [f"rank {info.rank} ({info.failure})" for info in failed[:8]]
    what = (
        f"rank {rank} keeps no failed cell" if rank is not None else "no rank keeps a failed cell"
    )
    raise NbdistError(
        f"`{asked}`: {what}: a failure is kept until the next cell begins on its rank; "
        + (f"look at {', '.join(others)} instead" if others else "run the failing cell again first")
    )
