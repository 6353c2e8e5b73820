"""The bar of work that a client hands to ranks (client)."""

from __future__ import annotations

import sys
import threading

from tqdm.std import tqdm

__all__ = ["Bar"]


class Bar(tqdm):  # type: ignore[misc] # tqdm has no types
    """A bar on stderr, redrawn at most twice a second.

    Args:
        total: how much is to be done.
        shown: False draws nothing.
        desc: what is being done.
        unit: what is counted.
    """

    _lock = threading.RLock()  # tqdm's own would hold a semaphore

    def __init__(self, *, total: int, shown: bool, desc: str, unit: str) -> None:
        super().__init__(
            total=total, disable=not shown, file=sys.stderr, desc=desc, unit=unit, mininterval=0.5
        )
