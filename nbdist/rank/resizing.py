"""What a client has all ranks do when their number changes (rank, between cells)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbdist.ports import current_port

if TYPE_CHECKING:
    from nbdist.train.moving import Moved

__all__ = ["hand_over", "problems", "take_up"]

_TRAINER = "nbdist.train.trainer"  # no rank has one that has not imported this


def problems(world_size: int) -> list[str]:
    """See `nbdist.train.moving`."""
    if _TRAINER not in sys.modules:
        return []
    from nbdist.train import moving

    return moving.problems(_namespace(), world_size)


def hand_over(leaving: Sequence[int], *, can_talk: bool) -> None:
    """See `nbdist.train.moving`."""
    if _TRAINER in sys.modules:
        from nbdist.train import moving

        moving.hand_over(_namespace(), leaving, can_talk=can_talk)


def take_up(new: Sequence[int]) -> Moved:
    """See `nbdist.train.moving`."""
    from nbdist.train import moving

    port = current_port()
    assert port is not None, "a rank of a world"
    return moving.take_up(port, new)


def _namespace() -> dict[str, object]:
    port = current_port()
    assert port is not None, "a rank of a world"
    return port.namespace
