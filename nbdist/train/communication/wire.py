"""Counts the bytes that a rank sends, from the sizes of its collectives (ranks)."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["WireCounter", "bytes_sent"]

# name -> (place of the tensor that counts, its keyword)
_COUNTED = {
    "all_reduce": (0, "tensor"),
    "all_gather_single": (0, "output_tensor"),
    "reduce_scatter_single": (1, "input"),
    "all_to_all_single": (1, "input"),
}


def bytes_sent(name: str, num_bytes: int, world_size: int) -> float:
    """Return the bytes that one rank sends in a collective that is bandwidth optimal.

    A ring all_reduce sends 2(n-1)/n of its tensor, its two halves and an all_to_all (n-1)/n of
    the larger of input and output (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations"). Headers are not counted.

    Args:
        name: of the function in `torch.distributed`.
        num_bytes: of the tensor before reduction, or after gathering.
        world_size: ranks in the group.

    Raises:
        ValueError: no formula is known for the collective.
    """
    if name not in _COUNTED:
        raise ValueError(f"bytes of {name!r} were asked for; known are {', '.join(_COUNTED)}")
    share = (world_size - 1) / world_size * num_bytes
    return 2 * share if name == "all_reduce" else share


class WireCounter:
    """Counts what this rank sends while it is entered: of DDP with a hook, FSDP and own calls.

    It sees calls of `torch.distributed` by name. DDP without a communication hook and tensor
    parallelism reduce below these names and are not counted.

    Attributes:
        sent: bytes by name of the collective.
        calls: number by name.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._originals: dict[str, Callable[..., Any]] = {}
        self._lock = threading.Lock()  # hooks go on in threads of the backend

    @property
    def total(self) -> int:
        """All bytes sent."""
        return sum(self.sent.values())

    def __enter__(self) -> Self:
        for name in _COUNTED:
            self._originals[name] = getattr(dist, name)
            setattr(dist, name, self._counting(name, self._originals[name]))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _counting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        place, keyword = _COUNTED[name]

        @functools.wraps(original)
        def counting(*args: Any, **kwargs: Any) -> Any:
            tensor: torch.Tensor = args[place] if len(args) > place else kwargs[keyword]
            size = dist.get_world_size(kwargs.get("group"))
            with self._lock:
                self.calls[name] += 1
                self.sent[name] += round(
                    bytes_sent(name, tensor.numel() * tensor.element_size(), size)
                )
            return original(*args, **kwargs)

        return counting
