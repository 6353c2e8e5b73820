"""The process of one rank: an ipyparallel engine with nbdist's link and executor (rank).

`nbdist.rank.supervisor` calls `main` in a process of its own. What takes long runs side by side:
torch is imported in a thread while MPI starts and the engine registers with its controller.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist import keeper
from nbdist.messages import (
    AbortGroup,
    JoinFailed,
    JoinGroup,
    Message,
    RankInfo,
    Shutdown,
    Stage,
    StatusQuery,
    TakePlace,
)
from nbdist.rank.binding import Device, Place, bind_device, read_place, take_place
from nbdist.rank.link import RankLink
from nbdist.rank.loading import end_loading
from nbdist.rank.log import log_path
from nbdist.runfiles import write_json

if TYPE_CHECKING:
    from nbdist.rank.executor import Executor
    from nbdist.rank.group import Group
    from nbdist.rank.namespace import Namespace

__all__ = ["Rank", "open_link", "main"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Session:
    """What a rank has once it takes cells."""

    engine_id: int
    executor: Executor
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class _Membership:
    """What a rank has once it has joined its first process group."""

    device: Device
    group: Group
    follow: Callable[[int, tuple[int, ...]], None]
    """Is told this rank's number in the next group, and what clients call the group's ranks."""


class Rank:
    """Ties the parts of a rank together; lives as long as the process.

    Args:
        directory: the world's.
        place: which rank this is; None for a spare, which is told later.
        link: to the clients.
    """

    def __init__(self, directory: Path, place: Place | None, link: RankLink) -> None:
        self.directory = directory
        self.place = place
        self.link = link
        self._torch_failure: list[BaseException] = []
        self._torch = threading.Thread(target=self._import_torch, name="nbdist-import")
        self._session: _Session | None = None
        self._membership: _Membership | None = None
        link.on_message(Shutdown, self._shutdown)
        link.on_message(StatusQuery, self._tell_status)

    def import_torch_soon(self) -> None:
        """Start importing torch in a thread."""
        self._torch.start()

    def wait_for_torch(self) -> None:
        """Return when torch has been imported; raise what its import has raised."""
        self._torch.join()
        if self._torch_failure:
            raise self._torch_failure[0]

    def announce(self) -> None:
        """Write where clients reach this rank."""
        assert self.place is not None, "a spare announces itself when it has a place"
        pid = os.getpid()
        entry = {
            "rank": self.place.rank,
            "endpoint": self.link.endpoint,
            "pid": pid,
            "started": keeper.start_ticks(pid),
            "local_rank": self.place.local_rank,
            "host": self.place.host,
        }
        write_json(self.directory / "ranks" / f"{self.place.rank}.json", entry)

    def host_cells(self, kernel: Any, engine_id: int) -> None:
        """Take cells from now on (main thread, inside the running event loop)."""
        from nbdist.ports import install_port as install_survival_port
        from nbdist.rank.names import NameService
        from nbdist.rank.namespace import Namespace
        from nbdist.rank.pausing import Pauser
        from nbdist.rank.session import open_session
        from nbdist.rank.survive import Survivor
        from nbdist.rank.trials import TrialDesk

        loop = asyncio.get_running_loop()
        executor = open_session(kernel, self.link, self.directory)
        namespace = Namespace(kernel.shell.user_ns)
        NameService(kernel, self.link, executor, namespace.is_ours)
        Pauser(self.link, executor)
        TrialDesk(self.link, executor.output)
        survivor = Survivor(executor, namespace, self._join)

        def join_soon(message: Message) -> None:
            assert isinstance(message, JoinGroup), message
            if not survivor.takes(message):
                loop.call_soon_threadsafe(self._join, message)

        def abort(message: Message) -> None:
            assert isinstance(message, AbortGroup), message
            survivor.takes(message)
            if self._membership is not None:
                self._membership.group.abort(message.generation)

        install_survival_port(survivor)
        self.link.on_message(TakePlace, self._take_place)
        self.link.on_message(JoinGroup, join_soon)
        self.link.on_message(AbortGroup, abort)
        self._session = _Session(engine_id, executor, namespace)
        self.stage("registered")

    def _take_place(self, message: Message) -> None:
        """Be called by another number from now on (control thread); the group is another thing."""
        assert isinstance(message, TakePlace), message
        assert self._session is not None, "is asked once it takes cells"
        self.place = take_place(message.rank, message.local_rank, message.world_size)
        self.link.rank = message.rank
        self._session.executor.output.move_log(log_path(self.directory, message.rank))
        if self._membership is not None and self._membership.group.world_size:
            group = self._membership.group
            group.ranks = tuple(range(group.world_size))
        self.announce()

    def stage(self, text: str, *, failed: bool = False) -> None:
        """Tell the client what this rank is doing."""
        self.link.emit(Stage(rank=self.link.rank, text=text, failed=failed))

    def _import_torch(self) -> None:
        try:
            import torch.distributed  # noqa: F401
        except BaseException as error:  # noqa: BLE001 - handed to the thread that needs torch
            self._torch_failure.append(error)

    def _join(self, message: JoinGroup) -> bool:
        """Join a generation of the group and answer with who this rank is (main thread)."""
        assert self._session is not None, "is asked once it takes cells"
        assert self.place is not None, "takes cells once it has a place"
        try:
            member = self._membership = self._membership or self._first_join()
            self._renumber(member, message.ranks)
            member.group.join(message.generation, message.store, message.timeout_seconds)
            self._session.namespace.set_mesh(member.device.name, len(message.ranks))
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
            return False
        self._tell_status(message)
        return True

    def _first_join(self) -> _Membership:
        assert self._session is not None, "joins once it takes cells"
        assert self.place is not None, "takes cells once it has a place"
        self.wait_for_torch()
        from nbdist.rank.group import Group
        from nbdist.rank.whereabouts import watch_collectives

        device = bind_device(self.place.local_rank)
        group = Group(device.name)
        follow = watch_collectives(self.directory, self.link, group, self._session.executor)
        end_loading()
        return _Membership(device, group, follow)

    def _renumber(self, member: _Membership, ranks: tuple[int, ...]) -> None:
        """Be the rank that the next group makes of this one (main thread)."""
        assert self._session is not None, "joins once it takes cells"
        assert self.place is not None, "takes cells once it has a place"
        group, before = member.group, (member.group.rank, member.group.world_size)
        group.place(self.place.rank, ranks)
        member.follow(group.rank, ranks)
        if before == (group.rank, group.world_size):
            return
        number = dataclasses.replace(self.place, rank=group.rank, world_size=group.world_size)
        self._session.namespace.set_place(number, member.device.name)

    def _tell_status(self, message: Message) -> None:
        assert isinstance(message, StatusQuery | JoinGroup), message
        assert self.place is not None, "a spare is told its place first"
        session, member = self._session, self._membership
        device = member.device if member else Device(name="", label="", memory_bytes=0)
        failure = session.executor.failure if session else None
        self.link.emit(
            RankInfo(
                rank=self.place.rank,
                world_size=self.place.world_size,
                local_rank=self.place.local_rank,
                host=self.place.host,
                pid=os.getpid(),
                device=device.name,
                device_name=device.label,
                memory_bytes=device.memory_bytes,
                engine_id=session.engine_id if session else -1,
                generation=member.group.generation if member else -1,
                running_cell=session.executor.running_cell if session else "",
                failure=failure.text if failure else "",
                failed_at_seconds=failure.at_seconds if failure else 0.0,
                query_id=message.query_id,
            )
        )

    def _shutdown(self, message: Message) -> None:
        assert isinstance(message, Shutdown), message
        # gloo threads abort a process that ends by returning from main: leave without them.
        os._exit(message.exit_code)


def open_link(directory: Path, rank: int) -> RankLink:
    """Return a link that listens where the client has said, with the world's keys."""
    keys = json.loads((directory / "keys.json").read_text())
    interface = os.environ.get("NBDIST_INTERFACE", "127.0.0.1")
    pair = (keys["public"].encode("ascii"), keys["secret"].encode("ascii"))
    return RankLink(rank, interface, pair)


def main() -> None:
    """Run a rank until it is told to end."""
    directory, world_size = Path(sys.argv[1]), int(sys.argv[2])
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    if sys.argv[3:]:
        place = take_place(int(sys.argv[3]), int(sys.argv[4]), world_size)
    else:
        place = read_place(world_size)
    link = open_link(directory, place.rank)
    rank = Rank(directory, place, link)
    rank.import_torch_soon()
    link.start()
    rank.announce()
    from nbdist.rank.ipengine import run_engine

    run_engine(rank)
