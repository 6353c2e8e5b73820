"""From settings to a verified process group, and asking all ranks something (client)."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from nbdist.cluster.causes import advice
from nbdist.cluster.config import WorldConfig, default_num_ranks
from nbdist.cluster.launch import Processes, log_tail
from nbdist.cluster.link import WorldLink
from nbdist.cluster.mpi import find_launcher
from nbdist.cluster.rankfile import read_rank
from nbdist.errors import RankLostError, StartError
from nbdist.messages import (
    JoinFailed,
    JoinGroup,
    Message,
    RankDone,
    RankInfo,
    Stage,
    StatusQuery,
)
from nbdist.runfiles import WorldRecord

__all__ = ["Started", "start", "join_group", "wait_until_registered", "ask"]

POLL_SECONDS = 0.01


@dataclass(slots=True)
class Started:
    """What `start` has brought up."""

    processes: Processes
    link: WorldLink
    infos: list[RankInfo]


def start(config: WorldConfig, tell: Callable[[str], None]) -> Started:
    """Start a world; on any failure nothing of it is left.

    Raises:
        StartError: names the stage, the cause and what to type.
    """
    num_ranks = config.num_ranks or default_num_ranks()
    launcher = find_launcher(config.mpi_command)
    processes = Processes.create(num_ranks, config, launcher)
    link: WorldLink | None = None
    try:
        tell(f"starting {num_ranks} ranks with {launcher.version}")
        processes.start()
        link = WorldLink(processes.directory)
        deadline = time.monotonic() + config.timeout_seconds
        _connect_all(processes, link, deadline, tell)
        tell("ranks are up; importing torch, registering")
        infos = _first_group(processes, link, deadline, tell)
    except BaseException:
        if link is not None:
            link.close()
        processes.stop(patience_seconds=0.0)
        raise
    return Started(processes=processes, link=link, infos=infos)


def join_group(
    link: WorldLink,
    record: WorldRecord,
    generation: int,
    ranks: Sequence[int],
    timeout_seconds: float = 60.0,
) -> list[RankInfo]:
    """Have ranks join a generation of the group, in this order, and verify it.

    Raises:
        StartError: a rank could not join; the text gives its reason.
        RankLostError: a rank died meanwhile.
    """
    answers = ask(link, _join_request(record, generation, ranks), ranks, timeout_seconds)
    if missing := sorted(set(ranks) - set(answers)):
        raise RankLostError(
            f"generation {generation} of the process group was not made: rank {missing[0]} did "
            "not answer; `%distributed heal` replaces it if its process is gone",
            ranks=tuple(missing),
        )
    return [answers[rank] for rank in ranks]


def wait_until_registered(
    link: WorldLink, ranks: Sequence[int], check: Callable[[set[int]], None]
) -> None:
    """Wait until ranks have registered with the controller and take cells.

    Args:
        link: to the ranks, connected.
        ranks: which ones.
        check: is called with those that have not, ten times a second; ends the wait by raising.
    """
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    query = StatusQuery(query_id=uuid.uuid4().hex)
    end_stages = link.subscribe(Stage, lambda _rank, event: inbox.put(event))
    link.listen(query.query_id, lambda _rank, event: inbox.put(event))
    waiting = set(ranks)
    try:
        # A rank that registered before this client was connected will not say so again.
        for rank in waiting - link.lost_ranks:
            link.post(rank, query)
        while waiting:
            check(waiting)
            with suppress(queue.Empty):
                event = inbox.get(timeout=0.1)
                if _has_registered(event):
                    waiting.discard(event.rank)
    finally:
        end_stages()
        link.listen(query.query_id, None)


def _has_registered(event: Message) -> TypeGuard[RankInfo | Stage]:
    if isinstance(event, RankInfo):
        return event.engine_id >= 0
    return isinstance(event, Stage) and event.text == "registered"


def ask(
    link: WorldLink, query: StatusQuery | JoinGroup, ranks: Sequence[int], timeout_seconds: float
) -> dict[int, RankInfo]:
    """Send a query to ranks and return the answers that came in time, by rank.

    Raises:
        StartError: a rank answered that it cannot join the group.
    """
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    link.listen(query.query_id, lambda _rank, event: inbox.put(event))
    answers: dict[int, RankInfo] = {}
    waiting = set(ranks)
    try:
        for rank in ranks:
            link.post(rank, query)
        deadline = time.monotonic() + timeout_seconds
        while waiting and (left := deadline - time.monotonic()) > 0:
            try:
                event = inbox.get(timeout=left)
            except queue.Empty:
                break
            _take(event, answers, waiting)
    finally:
        link.listen(query.query_id, None)
    return answers


def _take(event: Message, answers: dict[int, RankInfo], waiting: set[int]) -> None:
    if isinstance(event, RankInfo):
        answers[event.rank] = event
        waiting.discard(event.rank)
    elif isinstance(event, RankDone):  # the rank was lost
        waiting.discard(event.rank)
    elif isinstance(event, JoinFailed):
        reason = "; ".join(filter(None, (event.reason.strip(), advice(event.reason))))
        raise StartError(
            f"rank {event.rank} cannot join the process group: {reason}", stage="process group"
        )


def _join_request(record: WorldRecord, generation: int, ranks: Sequence[int]) -> JoinGroup:
    return JoinGroup(
        query_id=uuid.uuid4().hex,
        generation=generation,
        store=str(Path(record.directory) / "store"),
        timeout_seconds=record.settings["collective_timeout_seconds"],
        ranks=tuple(ranks),
    )


def _connect_all(
    processes: Processes, link: WorldLink, deadline: float, tell: Callable[[str], None]
) -> None:
    waiting = set(range(processes.record.num_ranks))
    stage = "MPI start"
    tell("waiting for MPI")
    while waiting:
        for rank in sorted(waiting):
            if (file := read_rank(processes.directory, rank)) is not None:
                link.connect(rank, file.endpoint)
                waiting.discard(rank)
        processes.check(stage)
        _check_deadline(processes, deadline, stage, waiting)
        if waiting:
            time.sleep(POLL_SECONDS)


def _first_group(
    processes: Processes, link: WorldLink, deadline: float, tell: Callable[[str], None]
) -> list[RankInfo]:
    """Wait for every rank's registration, then make generation 0."""
    ranks = list(range(processes.record.num_ranks))

    def check(waiting: set[int]) -> None:
        processes.check("registration with the controller")
        _check_deadline(processes, deadline, "registration with the controller", waiting)

    wait_until_registered(link, ranks, check)
    tell("making and verifying the process group")
    request = _join_request(processes.record, 0, ranks)
    answers = ask(link, request, ranks, max(1.0, deadline - time.monotonic()))
    if missing := sorted(set(ranks) - set(answers)):
        processes.check("process group")
        _check_deadline(processes, 0.0, "process group", set(missing))
    return [answers[rank] for rank in ranks]


def _check_deadline(processes: Processes, deadline: float, stage: str, waiting: set[int]) -> None:
    if time.monotonic() > deadline:
        raise StartError(
            f"{processes.record.num_ranks} ranks were asked for, but rank {min(waiting)} did not "
            f"get past: {stage}; give it more time with timeout_seconds=, or read the log below",
            stage=stage,
            log=log_tail(processes.directory / "logs" / "mpirun.log"),
        )
