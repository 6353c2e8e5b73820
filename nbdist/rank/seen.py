"""What a collective was called with, as the check of collectives sees it (rank)."""

from __future__ import annotations

from typing import Any, NamedTuple

from nbdist.rank.calls import ANY

__all__ = ["OPS", "REDUCTIONS", "Seen"]

OPS = (
    "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather",
    "scatter", "barrier", "monitored_barrier", "all_reduce_coalesced", "all_gather_coalesced",
    "reduce_scatter_coalesced", "send", "recv", "isend", "irecv", "batch_isend_irecv",
)  # fmt: skip
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


class Seen(NamedTuple):
    """What a collective was called with.

    Attributes:
        group: the process group.
        tensor: the one that stands for the call, or None.
        numel: elements that every rank must give, or ANY.
        peer_to_peer: only two ranks take part; nothing is compared.
    """

    op: str
    group: Any
    tensor: Any = None
    numel: int = ANY
    reduction: int = ANY
    root: int = ANY
    peer_to_peer: bool = False
