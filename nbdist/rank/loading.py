"""When the garbage collector looks at what a rank loads (rank)."""

from __future__ import annotations

import gc

__all__ = ["begin_loading", "end_loading"]


def begin_loading() -> None:
    """Switch the collector off: while torch is imported it takes a quarter of the time.

    It would find next to nothing: a module's objects stay.
    """
    gc.disable()


def end_loading() -> None:
    """Have the collector begin, with what is loaded by now out of its sight."""
    gc.freeze()
    gc.enable()
