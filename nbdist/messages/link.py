"""Messages between a client and its ranks: who they are, and cells (anywhere; stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbdist.messages.wire import Message, message

__all__ = [
    "StatusQuery",
    "RankInfo",
    "Stage",
    "Shutdown",
    "RunCell",
    "Interrupt",
    "StopDeferred",
    "WhereQuery",
    "Where",
    "CellNote",
    "Unhandled",
    "CellEvent",
    "RankStream",
    "RankDisplay",
    "RankFailed",
    "RankError",
    "RankDone",
    "TEXT_LIMIT",
]

TEXT_LIMIT = 64 << 20


@message("status_query")
class StatusQuery(Message):
    """Client to rank: who are you and what do you run? The rank answers with its `RankInfo`."""

    query_id: str


@message("rank_info")
class RankInfo(Message):
    """Rank to client: who a rank is. Memory is the device's for a GPU, the host's for a CPU.

    Attributes:
        generation: of the process group the rank is in; -1 before the first.
        running_cell: id of the cell that runs; empty when idle.
        failure: kind of the exception whose traceback the rank keeps; empty when it keeps none.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    pid: int
    device: str
    device_name: str = ""
    memory_bytes: int = 0
    engine_id: int = -1
    generation: int = -1
    running_cell: str = ""
    failure: str = ""
    failed_at_seconds: float = 0.0
    query_id: str = ""


@message("stage")
class Stage(Message):
    """Rank to client: what the rank is doing while the world starts."""

    rank: int
    text: str
    failed: bool = False


@message("shutdown")
class Shutdown(Message):
    """Client to rank: end the process.

    Attributes:
        exit_code: 0 when the world ends; another for a rank that is ended alone.
    """

    exit_code: int = 0


@message("run")
class RunCell(Message):
    """Client to rank: run `source` in the rank's namespace.

    Attributes:
        execution_count: the notebook's cell number, shown in tracebacks; 0 keeps the rank's own.
        ranks: every rank that runs the cell.
        text_limit: most characters of text a rank sends at once; what is beyond is in its log.
        can_ask: whether the client answers an `InputRequest`.
        rejoin: the other ranks are inside this call of the cell (see `CanRecover.call`), and this
            rank is to join them there; empty to run the cell from its beginning.
        resumes: all ranks have stopped in this call, and are to run the cell from there on.
    """

    cell_id: str
    source: str
    ranks: tuple[int, ...]
    execution_count: int = 0
    text_limit: int = TEXT_LIMIT
    can_ask: bool = False
    rejoin: tuple[int, ...] = ()
    resumes: tuple[int, ...] = ()


@message("interrupt")
class Interrupt(Message):
    """Client to rank: stop the cell of this id, and no other."""

    cell_id: str


@message("stop_deferred")
class StopDeferred(Message):
    """Rank to client: the cell has taken the interrupt and stops later, as after a step."""

    rank: int
    cell_id: str


@message("where_query")
class WhereQuery(Message):
    """Client to rank: which collective or line are you in? Answered by one `Where`."""

    query_id: str


@message("where")
class Where(Message):
    """Rank to client: where the rank's main thread is.

    Attributes:
        running_cell: id of the cell that runs; empty when idle.
        asks: whether the cell waits for the user's input.
        line: of the user's code, such as `Cell In[3], line 2`; empty when unknown.
        waits_in: the collective that the main thread waits in; empty when in none.
        group: id of that collective's group; `number` is the call's in that group.
        group_ranks: all ranks that must make the call; empty for a send or receive.
        counts: `{group id: number of the last call}` of every group this rank has used.
    """

    rank: int
    query_id: str
    running_cell: str = ""
    asks: bool = False
    line: str = ""
    waits_in: str = ""
    waited_seconds: float = 0.0
    group: str = ""
    number: int = 0
    group_ranks: tuple[int, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)


@message("cell_note")
class CellNote(Message):
    """Made by the client: a remark about a running cell; each replaces the one before.

    Attributes:
        text: plain text of one or more lines.
        is_status: says only that the cell runs and where; of use when nothing else is shown.
        ranks: a remark about these ranks, which stays, as a line of theirs.
    """

    cell_id: str
    text: str
    is_status: bool = False
    ranks: tuple[int, ...] = ()


@message("unhandled")
class Unhandled(Message):
    """Rank to client: nothing on this rank handles messages of this kind.

    Attributes:
        topic: the id of the message, as `topic_of` gives it.
    """

    rank: int
    unhandled: str
    topic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEvent(Message):
    """Base of a rank's events of one cell; `seq` counts them from 0."""

    rank: int
    cell_id: str
    seq: int


@message("stream")
class RankStream(CellEvent):
    """Rank to client: text that the rank wrote since its last event.

    Attributes:
        left_out: number of characters before this text that only the rank's log has.
    """

    stream: str
    text: str
    left_out: int = 0


@message("display")
class RankDisplay(CellEvent):
    """Rank to client: one Jupyter display message.

    Attributes:
        action: `display_data`, `update_display_data`, `execute_result` or `clear_output`.
        content: the content of the Jupyter message of that name.
    """

    action: str
    content: dict[str, Any]


@message("failed")
class RankFailed(CellEvent):
    """Rank to client: the cell has raised; its `RankError` follows once that has been formatted."""


@message("error")
class RankError(CellEvent):
    """Rank to client: the exception that ended the rank's cell, and what may help against it."""

    name: str
    value: str
    traceback: str
    at_seconds: float = 0.0
    hint: str = ""


@message("done")
class RankDone(CellEvent):
    """Rank to client: the cell has ended on this rank; nothing of it comes after.

    Attributes:
        status: `ok`, `error`, `interrupted`, `busy` (another cell runs; nothing was run) or
            `lost` (made by the client when the rank's process is gone).
    """

    status: str
    seconds: float
    detail: str = ""
