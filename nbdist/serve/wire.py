"""How the ranks of a group replica talk: the first tells, all agree (ranks)."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from nbdist.messages import Sampling
from nbdist.serve.engine import EngineRequest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Kind", "Op", "Told", "Wire", "own_group"]

# longer than any step or pause of Python may take; a rank that hangs ends the replica after it
_TIMEOUT = timedelta(seconds=300)


class Kind(IntEnum):
    """What the first rank tells the others."""

    STEP = 1
    """Take the ops and do a step."""
    BEAT = 2
    """I am there; are you?"""
    END = 3
    """No more steps before the next update."""
    STOP = 4
    """The replica has ended."""


@dataclass(frozen=True, slots=True)
class Op:
    """A call of the first rank's engine, to be made on the others as well.

    Attributes:
        at: its clock then.
        submitted: a request to take, or
        cancelled: the id of one to let go.
    """

    at: float
    submitted: EngineRequest | None = None
    cancelled: str = ""


@dataclass(frozen=True, slots=True)
class Told:
    """One message of the first rank.

    Attributes:
        kind: what to do; only a STEP has the rest.
        at: its clock.
        made: digest of all tokens that it has made so far.
        ops: calls before the step.
    """

    kind: Kind
    at: float = 0.0
    made: int = 0
    ops: tuple[Op, ...] = ()


class Wire:
    """A process group that carries nothing but this. All calls are collective over it.

    Args:
        group: of the ranks of one replica.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.ranks = dist.get_process_group_ranks(group)

    def tell(self, told: Told) -> None:
        """Send to the others; on the first rank."""
        data = _packed(told) if told.kind is Kind.STEP else bytearray()
        head = torch.tensor([told.kind, len(data)])
        dist.broadcast(head, self.ranks[0], self._group)
        if data:
            dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), self.ranks[0], self._group)

    def hear(self) -> Told:
        """Wait for what the first rank tells; on the others."""
        head = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(head, self.ranks[0], self._group)
        kind, size = head.tolist()
        if not size:
            return Told(Kind(kind))
        data = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(data, self.ranks[0], self._group)
        return _unpacked(data.numpy().tobytes())

    def agree(self, values: list[int]) -> list[int]:
        """Return the largest of each value over the ranks."""
        largest = torch.tensor(values)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        return [int(value) for value in largest.tolist()]


def own_group(ranks: list[int]) -> ProcessGroup:
    """Return a new process group, used by nothing else. Collective over: these ranks."""
    made = dist.new_group(ranks, timeout=_TIMEOUT, use_local_synchronization=True)
    return cast("ProcessGroup", made)  # of this rank, so it is one


def _packed(told: Told) -> bytearray:
    return bytearray(json.dumps(dataclasses.asdict(told)).encode())


def _unpacked(data: bytes) -> Told:
    told = json.loads(data)
    ops = tuple(
        Op(op["at"], _request(op["submitted"]) if op["submitted"] else None, op["cancelled"])
        for op in told["ops"]
    )
    return Told(Kind(told["kind"]), told["at"], told["made"], ops)


def _request(fields: dict[str, Any]) -> EngineRequest:
    sampling = dict(fields["sampling"])
    sampling["stop"] = tuple(sampling["stop"])
    return EngineRequest(**{**fields, "sampling": Sampling(**sampling)})
