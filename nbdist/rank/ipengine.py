"""The ipyparallel side of a rank: registration, apply, push and pull (rank).

Cells do not pass here. An engine's queue would hold them behind a running one, and its replies
do not survive an interrupt or a top-level `await` (ipyparallel 9.2 with ipykernel 7.4).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipyparallel.engine.app import IPEngine
from ipyparallel.engine.kernel import IPythonParallelKernel

if TYPE_CHECKING:
    from nbdist.rank.engine import Rank

__all__ = ["run_engine"]

log = logging.getLogger(__name__)

CONTROLLER_SECONDS = 60
POLL_SECONDS = 0.01


class _NoShellChannelThread:
    """Stands in for the thread that ipykernel 7.1 and later look up but an engine has not.

    It is false, so that ipykernel takes the path of a kernel without that thread.
    """

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


def _leave_signals() -> None:
    """Leave SIGINT to the executor, and in a map to its batch."""


class RankEngine(IPEngine):  # type: ignore[misc]
    """An engine that hands its kernel to a `Rank` once it is registered."""

    host: Rank

    async def complete_registration(self, msg: Any, connect: Any, maybe_tunnel: Any) -> None:
        """Finish ipyparallel's part, then host cells."""
        await super().complete_registration(msg, connect, maybe_tunnel)
        self.kernel.shell_channel_thread = _NoShellChannelThread()
        # They would have SIGINT raise from here to there, and a second one then loses the reply.
        self.kernel.pre_handler_hook = self.kernel.post_handler_hook = _leave_signals
        try:
            self.host.host_cells(self.kernel, self.id)
        except BaseException:
            # ipyparallel drops it, and a client would wait for this rank in vain.
            log.exception("this process cannot take cells")
            os._exit(1)

    def redirect_output(self, iopub_socket: Any) -> None:
        """Leave the streams to the link."""

    def init_signal(self) -> None:
        """Leave SIGINT to the executor; SIGTERM ends the process as it is."""


def run_engine(rank: Rank) -> None:
    """Register with the world's controller and serve until the process ends."""
    IPythonParallelKernel._supports_kernel_subshells = property(lambda _self: False)
    connection = rank.directory / "profile" / "security" / "ipcontroller-engine.json"
    asyncio.set_event_loop(asyncio.new_event_loop())
    rank.stage("waiting for the controller")
    _wait_for(connection)
    engine = RankEngine.instance()
    engine.host = rank
    engine.id = rank.place.rank if rank.place else None
    engine.initialize(
        [
            f"--profile-dir={rank.directory / 'profile'}",
            f"--file={connection}",
            # The link sees a death sooner than a nanny, and stops cells without one.
            "--IPEngine.enable_nanny=False",
            # Ranks end with their launcher, never because the controller was slow.
            "--IPEngine.max_heartbeat_misses=0",
            f"--IPEngine.timeout={CONTROLLER_SECONDS}",
            "--log-level=30",
        ]
    )
    engine.start()


def _wait_for(connection: Path) -> None:
    """Wait until the controller has written its whole connection file.

    Raises:
        TimeoutError: it has not after a minute.
    """
    deadline = time.monotonic() + CONTROLLER_SECONDS
    while time.monotonic() < deadline:
        try:
            json.loads(connection.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            time.sleep(POLL_SECONDS)
        else:
            return
    raise TimeoutError(f"the controller wrote no {connection} within {CONTROLLER_SECONDS} s")
