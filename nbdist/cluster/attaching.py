"""Connects to the ranks of a world that runs already (client)."""

from __future__ import annotations

import uuid
from pathlib import Path

from nbdist.cluster import starting
from nbdist.cluster.link import WorldLink
from nbdist.cluster.rankfile import RankFile, read_rank
from nbdist.errors import RankLostError
from nbdist.messages import RankInfo, StatusQuery
from nbdist.runfiles import WorldRecord

__all__ = ["connect"]

ANSWER_SECONDS = 10.0


def connect(link: WorldLink, record: WorldRecord) -> list[RankInfo]:
    """Connect to the living ranks of a world and return who all of its ranks are.

    Ranks whose process is gone are lost on the link; `World.heal` starts them.

    Raises:
        RankLostError: the world is still starting, or a rank lives and does not answer.
    """
    files = [_read(record, rank) for rank in range(record.num_ranks)]
    for file in files:
        if file.is_alive:
            link.connect(file.rank, file.endpoint)
        else:
            link.give_up(file.rank)
    alive = sorted(set(range(record.num_ranks)) - link.lost_ranks)
    query = StatusQuery(query_id=uuid.uuid4().hex)
    answers = starting.ask(link, query, alive, timeout_seconds=ANSWER_SECONDS)
    if missing := sorted(set(alive) - set(answers) - link.lost_ranks):
        link.close()
        raise RankLostError(
            f"world {record.world_id} was found, but rank {missing[0]} lives and does not answer "
            f"within {ANSWER_SECONDS:g} s; end it with `kill -9 {files[missing[0]].pid}`, then "
            "attach and `%distributed heal`",
            ranks=tuple(missing),
        )
    return [answers.get(file.rank) or file.info(record.num_ranks) for file in files]


def _read(record: WorldRecord, rank: int) -> RankFile:
    file = read_rank(Path(record.directory), rank)
    if file is None:
        raise RankLostError(
            f"world {record.world_id} has no file for rank {rank}; it is still starting or "
            "was stopped; `nbdist worlds` lists what runs",
            ranks=(rank,),
        )
    return file
