"""A process that has done all it can without knowing which rank it will be (rank).

It has imported torch and registered with the controller, as every rank does, and waits for
`TakePlace` on its link. No device is touched before: which one is its own depends on the place.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

from nbdist import keeper
from nbdist.messages import Message, TakePlace
from nbdist.rank.binding import take_place
from nbdist.rank.engine import Rank, open_link
from nbdist.rank.link import RankLink
from nbdist.rank.loading import end_loading
from nbdist.runfiles import write_json

__all__ = ["SpareRank", "main"]

# What a rank imports between its registration and its first group.
LATER = (
    "nbdist.bulk",
    "nbdist.rank.group",
    "nbdist.rank.names",
    "nbdist.rank.namespace",
    "nbdist.rank.session",
    "nbdist.rank.whereabouts",
    "nbdist.train.trainer",
    "torch._dynamo",  # every torch optimizer imports it: a second
    "torch.distributed.device_mesh",
)


class SpareRank(Rank):
    """A rank without a number.

    Args:
        directory: the world's.
        token: what the client calls this spare by.
        link: to the clients.
    """

    def __init__(self, directory: Path, token: str, link: RankLink) -> None:
        super().__init__(directory, None, link)
        self._token = token

    def host_cells(self, kernel: Any, engine_id: int) -> None:
        """Make ready, say so, and take cells once a client has said which rank this is."""
        self._load()
        loop = asyncio.get_running_loop()
        host_as_rank = super().host_cells

        def take(message: Message) -> None:
            assert isinstance(message, TakePlace), message
            self.place = take_place(message.rank, message.local_rank, message.world_size)
            self.link.rank = message.rank
            self.announce()
            loop.call_soon_threadsafe(host_as_rank, kernel, engine_id)

        self.link.on_message(TakePlace, take)
        pid = os.getpid()
        entry = {"endpoint": self.link.endpoint, "pid": pid, "started": keeper.start_ticks(pid)}
        write_json(self.directory / "spares" / f"{self._token}.json", entry)

    def _load(self) -> None:
        self.wait_for_torch()
        for name in LATER:
            importlib.import_module(name)
        end_loading()


def main() -> None:
    """Run a spare, and the rank that it becomes, until it is told to end."""
    directory, token = Path(sys.argv[1]), sys.argv[4]
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    link = open_link(directory, -1)
    spare = SpareRank(directory, token, link)
    spare.import_torch_soon()
    link.start()
    from nbdist.rank.ipengine import run_engine

    run_engine(spare)
