"""The process of one rank: an ipyparallel engine with nbdist's link and executor (rank).

`nbdist.rank.supervisor` calls `main` in a process of its own. What takes long runs side by side:
torch is imported in a thread while MPI starts and the engine registers with its controller.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

from nbdist.messages import (
    AbortGroup,
    JoinFailed,
    JoinGroup,
    Message,
    RankInfo,
    Shutdown,
    Stage,
    StatusQuery,
)
from nbdist.rank.binding import Place, bind_device, read_place, take_place
from nbdist.rank.link import RankLink
from nbdist.runfiles import write_json

__all__ = ["Rank", "main"]

log = logging.getLogger(__name__)


def _import_torch(failure: list[BaseException]) -> None:
    try:
        import torch.distributed  # noqa: F401
    except BaseException as error:  # noqa: BLE001 - handed to the thread that needs torch
        failure.append(error)


class Rank:
    """Ties the parts of a rank together; lives as long as the process."""

    def __init__(self, directory: Path, place: Place, link: RankLink) -> None:
        self.directory = directory
        self.place = place
        self.link = link
        self.engine_id = -1
        self._info: RankInfo | None = None
        self._torch_failure: list[BaseException] = []
        self._torch = threading.Thread(target=_import_torch, args=(self._torch_failure,))
        self._loop: asyncio.AbstractEventLoop | None = None
        link.on_message(Shutdown, self._shutdown)
        link.on_message(StatusQuery, self._tell_status)

    def import_torch_soon(self) -> None:
        """Start importing torch in a thread."""
        self._torch.start()

    def host_cells(self, kernel: Any, engine_id: int) -> None:
        """Take cells from now on (main thread, inside the running event loop)."""
        from nbdist.rank.names import NameService
        from nbdist.rank.namespace import Namespace
        from nbdist.rank.session import open_session

        self.engine_id = engine_id
        self._loop = asyncio.get_running_loop()
        self.executor = open_session(kernel, self.link, self.directory)
        self.namespace = Namespace(kernel.shell.user_ns)
        NameService(kernel, self.link, self.executor, self.namespace.is_ours)
        self.link.on_message(JoinGroup, self._join_soon)
        self.link.on_message(AbortGroup, self._abort)
        self.stage("registered")

    def stage(self, text: str, *, failed: bool = False) -> None:
        """Tell the client what this rank is doing."""
        self.link.emit(Stage(rank=self.place.rank, text=text, failed=failed))

    def _join_soon(self, message: Message) -> None:
        assert self._loop is not None, "host_cells has set the loop"
        self._loop.call_soon_threadsafe(self._join, message)

    def _join(self, message: Message) -> None:
        """Join a generation of the group and answer with who this rank is (main thread)."""
        assert isinstance(message, JoinGroup), message
        try:
            self._first_join()
            self.group.join(message.generation, message.store, message.timeout_seconds)
            self.namespace.set_mesh(self.device.name, self.place.world_size)
        except Exception as error:
            log.exception("rank %d cannot join generation %d", self.place.rank, message.generation)
            self.link.emit(
                JoinFailed(
                    rank=self.place.rank,
                    query_id=message.query_id,
                    generation=message.generation,
                    reason=f"{type(error).__name__}: {error}",
                )
            )
            return
        self._tell_status(message)

    def _first_join(self) -> None:
        if hasattr(self, "group"):
            return
        self._torch.join()
        if self._torch_failure:
            raise self._torch_failure[0]
        from nbdist.rank.group import Group

        self.device = bind_device(self.place.local_rank)
        self.group = Group(self.place.rank, self.place.world_size, self.device.name)
        self._watch_collectives()
        self.namespace.set_place(self.place, self.device.name)
        # What is loaded by now stays: the collector need not look at it again in every step.
        gc.collect()
        gc.freeze()

    def _watch_collectives(self) -> None:
        from nbdist.rank.whereabouts import watch_collectives

        watch_collectives(self.directory, self.link, self.group, self.executor)

    def _tell_status(self, message: Message) -> None:
        assert isinstance(message, StatusQuery | JoinGroup), message
        device = getattr(self, "device", None)
        failure = self.executor.failure if hasattr(self, "executor") else None
        self.link.emit(
            RankInfo(
                rank=self.place.rank,
                world_size=self.place.world_size,
                local_rank=self.place.local_rank,
                host=self.place.host,
                pid=os.getpid(),
                device=device.name if device else "",
                device_name=device.label if device else "",
                memory_bytes=device.memory_bytes if device else 0,
                engine_id=self.engine_id,
                generation=self.group.generation if device else -1,
                running_cell=self.executor.running_cell if hasattr(self, "executor") else "",
                failure=failure.text if failure else "",
                failed_at_seconds=failure.at_seconds if failure else 0.0,
                query_id=message.query_id,
            )
        )

    def _abort(self, message: Message) -> None:
        assert isinstance(message, AbortGroup), message
        self.group.abort(message.generation)

    def _shutdown(self, message: Message) -> None:
        assert isinstance(message, Shutdown), message
        # gloo threads abort a process that ends by returning from main: leave without them.
        os._exit(message.exit_code)


def main() -> None:
    """Run a rank until it is told to end."""
    directory, world_size = Path(sys.argv[1]), int(sys.argv[2])
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    if sys.argv[3:]:
        place = take_place(int(sys.argv[3]), int(sys.argv[4]), world_size)
    else:
        place = read_place(world_size)
    keys = json.loads((directory / "keys.json").read_text())
    interface = os.environ.get("NBDIST_INTERFACE", "127.0.0.1")
    link = RankLink(
        place.rank, interface, (keys["public"].encode("ascii"), keys["secret"].encode("ascii"))
    )
    rank = Rank(directory, place, link)
    rank.import_torch_soon()
    link.start()
    write_json(
        directory / "ranks" / f"{place.rank}.json",
        {"rank": place.rank, "endpoint": link.endpoint, "pid": os.getpid()},
    )
    from nbdist.rank.ipengine import run_engine

    run_engine(rank)
