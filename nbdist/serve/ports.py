"""What serving needs of the layer that connects client and ranks (anywhere; torch-free).

`serve` stands below `cluster` and `rank`: it names here what it needs, they provide it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from nbdist.errors import ServeError
from nbdist.messages import Message

__all__ = ["RankPort", "RanksPort", "current_port", "install_port"]


class RankPort(Protocol):
    """A rank's way to the client (rank)."""

    rank: int

    def emit(self, event: Message) -> None:
        """Send an event to the client that asked last for one of its kind; never blocks.

        May be called from any thread.
        """
        ...

    def on_message(self, kind: type[Message], handler: Callable[[Message], None] | None) -> None:
        """Call `handler` for every message of this kind; None takes the handler away.

        The handler runs on the rank's control thread: it must return at once.
        """
        ...


class RanksPort(Protocol):
    """The client's way to all ranks (client)."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the world."""
        ...

    def post(self, rank: int, message: Message) -> None:
        """Send a message to one rank; never blocks.

        Raises:
            RankLostError: the rank's process is gone.
        """
        ...

    def subscribe(
        self, kind: type[Message], handler: Callable[[int, Message], None]
    ) -> Callable[[], None]:
        """Call `handler(rank, event)` for every event of this kind; returns what ends it.

        The handler runs on the client's link thread: it must return at once. When a rank's
        process is lost, handlers of `Unhandled` get `Unhandled(unhandled="lost")` from it.
        """
        ...


_port: RankPort | None = None


def install_port(port: RankPort | None) -> None:
    """Set this process's port; called once by the rank's bootstrap."""
    global _port  # noqa: PLW0603 - one rank is one process
    _port = port


def current_port() -> RankPort:
    """Return this process's port.

    Raises:
        ServeError: this process is not a rank of a world.
    """
    if _port is None:
        raise ServeError(
            "`serve(model)` was called outside a rank: no link to a client is installed in this "
            "process; call it inside a %%distributed cell"
        )
    return _port
