"""Messages that ask a rank about the names in its namespace (anywhere; stdlib only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbdist.messages.wire import Message, message

__all__ = ["CompleteQuery", "InspectQuery", "NamesQuery", "NameRow", "NamesAnswer"]


@message("complete_query")
class CompleteQuery(Message):
    """Client to rank: what can stand at `cursor` (counted in characters) of this source?"""

    query_id: str
    source: str
    cursor: int


@message("inspect_query")
class InspectQuery(Message):
    """Client to rank: what is the name at `cursor` of this source?

    Attributes:
        detail: 1 asks for the source code as well.
    """

    query_id: str
    source: str
    cursor: int
    detail: int = 0


@message("names_query")
class NamesQuery(Message):
    """Client to rank: which names has the user made?

    Attributes:
        pattern: of file names, such as `x*`; empty for all.
    """

    query_id: str
    pattern: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRow:
    """What a rank says of one name.

    Attributes:
        shape: of a tensor or array; for a sharded tensor that of the part on this rank.
        num_bytes: of the data; 0 when it is not known.
        placements: of a sharded tensor, such as `Shard(dim=0)`.
        digest: equal on two ranks when the values are; empty when it was not computed.
        is_sampled: the digest covers a sample and the sum of a large value, not all of it.
    """

    name: str
    type_name: str
    shape: str = ""
    dtype: str = ""
    device: str = ""
    num_bytes: int = 0
    placements: str = ""
    digest: str = ""
    is_sampled: bool = False


@message("names_answer")
class NamesAnswer(Message):
    """Rank to client: the answer to any of the queries above.

    Attributes:
        busy: id of the cell that runs; what is told then is what can be read without running
            any code of the user.
        reply: content of Jupyter's `complete_reply` or `inspect_reply`.
        rows: answer to a `NamesQuery`, by name.
    """

    rank: int
    query_id: str
    busy: str = ""
    reply: dict[str, Any] = field(default_factory=dict)
    rows: tuple[NameRow, ...] = ()
