"""What `train` needs of the layer that starts processes (anywhere; torch-free).

`train` stands below `rank`: it names here what it needs, a rank of a world provides it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "PackedNames",
    "Policy",
    "SurvivalPort",
    "WaitClock",
    "current_port",
    "current_wait_clock",
    "install_port",
    "install_wait_clock",
]


PackedNames = tuple[dict[str, bytes], tuple[str, ...]]
"""Values of a user's names, packed, and the names whose values cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is done when a rank dies in `fit`.

    Attributes:
        on_failure: "heal" puts a new process in its place, "shrink" goes on without.
        min_ranks: fewest ranks to go on with; a multiple of `multiple_of` as well.
        multiple_of: ranks that the axes need which cannot change.
        max_failures: failures within `per_hours` that are answered so; the next one ends the cell.
        per_hours: length of that time.
    """

    on_failure: str
    min_ranks: int
    multiple_of: int
    max_failures: int
    per_hours: float


class SurvivalPort(Protocol):
    """A rank's way to those who replace its dead peers (main thread of a rank).

    Attributes:
        namespace: the dictionary that cells run in.
    """

    namespace: dict[str, Any]

    def begin(self, policy: Policy) -> str:
        """Say that from now on the running cell survives the death of a rank.

        Returns:
            Why a new rank could not take up the cell, as a sentence; empty when it can.
        """
        ...

    def end(self) -> None:
        """Say that it no longer does."""
        ...

    def wait_for_group(self, error: BaseException) -> None:
        """Return when the default group has been made anew; raise `error` when it will not be.

        Dead ranks have been replaced in it, or it is smaller.
        """
        ...

    def pack_names(self, known: dict[str, Any]) -> PackedNames:
        """Return the user's names for a new rank; objects of `known` stand by their name there."""
        ...

    def unpack_names(self, packed: PackedNames, known: dict[str, Any]) -> tuple[str, ...]:
        """Set the names that `pack_names` of another rank returned; return those that failed."""
        ...

    def rebind(self, pairs: list[tuple[Any, Any]]) -> None:
        """Let the user's names of old objects mean the new ones; pairs are (old, new)."""
        ...

    def recovered(self, *, step: int, steps_lost: int, source: str) -> None:
        """Tell that this rank goes on from `step`, with state from `source`."""
        ...


_port: SurvivalPort | None = None


def install_port(port: SurvivalPort | None) -> None:
    """Set this process's port; called once by the rank's bootstrap."""
    global _port  # noqa: PLW0603 - one rank is one process
    _port = port


def current_port() -> SurvivalPort | None:
    """Return this process's port; None outside a world's rank."""
    return _port


WaitClock = Callable[[], float]
"""Returns the seconds that the main thread has been inside collectives so far."""

_wait_clock: WaitClock | None = None


def install_wait_clock(clock: WaitClock | None) -> None:
    """Set what knows this process's time in collectives; called once by the rank's bootstrap."""
    global _wait_clock  # noqa: PLW0603 - one rank is one process
    _wait_clock = clock


def current_wait_clock() -> WaitClock | None:
    """Return what knows the time in collectives; None where they are not watched."""
    return _wait_clock
