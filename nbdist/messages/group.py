"""Messages about process groups and a rank's place in them (anywhere; stdlib only)."""

from __future__ import annotations

from nbdist.messages.wire import Message, message

__all__ = ["AbortGroup", "JoinFailed", "JoinGroup", "TakePlace"]


@message("join_group")
class JoinGroup(Message):
    """Client to rank: leave the process group you are in and join this generation of it.

    Answered by `RankInfo` once a collective of the new group has been verified, or `JoinFailed`.

    Attributes:
        store: path of the file that the group's rendezvous store lives in.
        ranks: all of its ranks; a rank's place among them is its number in the group. They are
            0, 1, 2 ..., unless the group is made while a cell goes on without a rank that died.
    """

    query_id: str
    generation: int
    store: str
    timeout_seconds: float
    ranks: tuple[int, ...]


@message("join_failed")
class JoinFailed(Message):
    """Rank to client: the rank is in no process group; `reason` says why."""

    rank: int
    query_id: str
    generation: int
    reason: str


@message("abort_group")
class AbortGroup(Message):
    """Client to rank: free whatever waits in a collective of this generation, and no later one.

    Attributes:
        heals: a rank has died and is being replaced; a cell that survives that is to wait.
    """

    generation: int
    heals: bool = False


@message("take_place")
class TakePlace(Message):
    """Client to a process: be this rank of so many from now on.

    A spare is told so before anything else; a rank when the number of ranks has changed.
    """

    rank: int
    local_rank: int
    world_size: int
