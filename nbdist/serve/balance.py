"""Which replica takes the next request: the least unfinished work (client; torch-free)."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.errors import Overloaded

if TYPE_CHECKING:
    from nbdist.messages import GenerateRequest, ModelServed

__all__ = ["Balance", "nobody_serves"]

_CHARACTERS = 4  # of a token, roughly: the client has no tokenizer
_PIECE = 64  # characters; a common start shorter than that is not worth a detour
_MAX_PIECES = 32
_MAX_KNOWN = 4096


@dataclass(slots=True)
class _Load:
    served: ModelServed
    outstanding: dict[str, int] = field(default_factory=dict)  # tokens by request
    last_used: int = 0
    draining: bool = False


class Balance:
    """The books of one model's replicas, by rank; the router's lock guards it.

    A request is work of about as many tokens as its prompt and its answer may have. It goes where
    the unfinished work is least, less the start of its prompt that a replica has computed for an
    earlier one: replicas share the starts of prompts, and none is buried under a popular one.

    Args:
        max_waiting: most requests that a replica has beyond its `max_batch`.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._loads: dict[int, _Load] = {}
        self._uses = itertools.count(1)
        self._known: OrderedDict[tuple[int, int], None] = OrderedDict()  # rank, hash of a start

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def served(self) -> dict[int, ModelServed]:
        """What each rank said of its replica."""
        return {rank: load.served for rank, load in sorted(self._loads.items())}

    @property
    def outstanding(self) -> dict[int, int]:
        """Unfinished requests of each rank."""
        return {rank: len(load.outstanding) for rank, load in sorted(self._loads.items())}

    def add(self, rank: int, served: ModelServed) -> None:
        """Note a replica, or a new version of a known one."""
        load = self._loads.setdefault(rank, _Load(served))
        if "draining" in {load.served.state, served.state}:
            load.draining = served.state == "draining"
        load.served = served

    def remove(self, rank: int) -> None:
        """Forget a rank's replica."""
        self._loads.pop(rank, None)

    def drain(self, rank: int) -> None:
        """Choose a rank no more."""
        if rank in self._loads:
            self._loads[rank].draining = True

    def undrain(self, rank: int) -> None:
        """Let a drained rank be chosen again."""
        if rank in self._loads:
            self._loads[rank].draining = False

    def assign(self, request: GenerateRequest) -> int:
        """Choose a rank for a request and count it there; ties go to the one used longest ago.

        Raises:
            Overloaded: every replica has as many requests as it takes, or is being drained.
        """
        pieces = _pieces(request.prompt)
        free = {
            rank: (sum(load.outstanding.values()) - self._saved(rank, pieces), load.last_used)
            for rank, load in self._loads.items()
            if not load.draining
            and len(load.outstanding) < load.served.max_batch + self._max_waiting
        }
        if not free:
            raise self._overloaded()
        rank = min(free, key=lambda r: free[r])
        work = len(request.prompt) // _CHARACTERS + request.sampling.max_new_tokens
        self._loads[rank].outstanding[request.request_id] = work
        self._loads[rank].last_used = next(self._uses)
        for piece in pieces:
            self._known[rank, piece] = None
            self._known.move_to_end((rank, piece))
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return rank

    def release(self, rank: int, request_id: str) -> None:
        """A request of this rank has ended."""
        if rank in self._loads:
            self._loads[rank].outstanding.pop(request_id, None)

    def _saved(self, rank: int, pieces: list[int]) -> int:
        known = itertools.takewhile(lambda piece: (rank, piece) in self._known, pieces)
        return sum(1 for _ in known) * _PIECE // _CHARACTERS

    def _overloaded(self) -> Overloaded:
        if all(load.draining for load in self._loads.values()):
            return Overloaded(
                f"all replicas are being drained: ranks {sorted(self._loads)}; send the request "
                "again after `undrain`",
                depth=0,
                limit=0,
            )
        loads = self._loads.values()
        depth = sum(len(load.outstanding) - load.served.max_batch for load in loads)
        limit = self._max_waiting * len(self._loads)
        return Overloaded(
            f"{depth} requests wait on ranks {sorted(self._loads)}, and at most max_waiting="
            f"{self._max_waiting} a replica may; send the request again when some have ended, or "
            "call `serve` with a larger max_batch",
            depth=depth,
            limit=limit,
        )


def nobody_serves(model: str, num_ranks: int) -> str:
    """Return what is said when no rank serves a model."""
    ranks = "rank 0" if num_ranks == 1 else f"ranks 0-{num_ranks - 1}"
    call = "serve(model, tokenizer)"
    if model != "default":
        call = f"serve(model, tokenizer, {model!r})"
    return (
        f"no model named {model!r} is served by {ranks}; run `{call}` in a %%distributed cell first"
    )


def _pieces(prompt: str) -> list[int]:
    """Return a hash of each start of a prompt that is whole pieces long."""
    ends = range(_PIECE, min(len(prompt), _PIECE * _MAX_PIECES) + 1, _PIECE)
    return [hash(prompt[:end]) for end in ends]
