"""What a process holds of memory, and giving back what it has freed (rank; torch-free)."""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass
from typing import Any

import psutil

__all__ = ["HeldBytes", "give_back_memory", "held_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Memory of this process.

    Attributes:
        host: resident, in bytes.
        device: taken from the GPU by torch, used or not; 0 without one.
    """

    host: int
    device: int


def held_bytes() -> HeldBytes:
    """Return what this process holds now."""
    cuda = _cuda()
    return HeldBytes(
        host=int(psutil.Process().memory_info().rss),
        device=int(cuda.memory_reserved()) if cuda is not None else 0,
    )


def give_back_memory() -> None:
    """Let the system have what this process has freed, on the host and on the GPU.

    Freed blocks below some megabytes stay with the C library, which hands them out again; only
    `malloc_trim` returns them. Other C libraries than glibc have no such function and need none.
    """
    gc.collect()  # modules refer to themselves
    if (cuda := _cuda()) is not None:
        cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _cuda() -> Any:
    """Return torch.cuda when this process has used it; importing it here would cost memory."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
