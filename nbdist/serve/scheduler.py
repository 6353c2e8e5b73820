"""Which requests run in the next step: waiting queue, window merge, slots (anywhere; torch-free).

It holds no lock: one thread, the replica's, calls it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from nbdist.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Row", "Scheduler"]


class Row(Protocol):
    """What the scheduler needs to know of a request."""

    @property
    def request_id(self) -> str:
        """Name of the request; unique among those that have not ended."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that its prefill computes."""
        ...


RowT = TypeVar("RowT", bound=Row)


class Scheduler(Generic[RowT]):
    """Continuous batching on slots: rows join between decode steps and leave when they end.

    A request is in exactly one place: waiting, active, or ended. `end` is the only way out, and
    says whether it was this call that ended the request.

    Args:
        max_batch: most rows that run together.
        window_seconds: an idle replica waits this long after the first request for others, so
            that a burst is prefilled together. While rows run, the steps themselves are the
            window and nobody waits.
        max_waiting: most requests that may wait beyond the free slots.
        max_prefill_tokens: most tokens, padding included, of one prefill: bounds how long a
            joining prompt holds up the running rows. One prompt is always let through.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        window_seconds: float,
        max_waiting: int,
        clock: Callable[[], float],
        max_prefill_tokens: int = 4096,
    ) -> None:
        if max_batch < 1 or max_waiting < 0 or window_seconds < 0:
            raise ValueError(
                f"max_batch={max_batch}, max_waiting={max_waiting}, window_seconds="
                f"{window_seconds}: a replica needs max_batch >= 1 and the others >= 0"
            )
        self.max_batch = max_batch
        self.max_waiting = max_waiting
        self.active: list[RowT] = []
        self._window_seconds = window_seconds
        self._max_prefill_tokens = max_prefill_tokens
        self._clock = clock
        self._waiting: deque[RowT] = deque()
        self._rows: dict[str, RowT] = {}
        self._window_ends = 0.0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    @property
    def rows(self) -> list[RowT]:
        """All requests that have not ended, waiting and active."""
        return list(self._rows.values())

    def submit(self, row: RowT) -> None:
        """Let a request wait for its turn.

        Raises:
            Overloaded: `max_waiting` requests wait already.
            ValueError: a request of this id has not ended yet.
        """
        if row.request_id in self._rows:
            raise ValueError(f"request {row.request_id!r} is already running; use a fresh id")
        depth = len(self._rows) - self.max_batch
        if depth >= self.max_waiting:
            raise Overloaded(
                f"{len(self._rows)} requests are running or waiting on this replica, and it takes "
                f"max_batch={self.max_batch} + max_waiting={self.max_waiting}; send the request "
                "again when some have ended",
                depth=depth,
                limit=self.max_waiting,
            )
        if not self._rows:
            self._window_ends = self._clock() + self._window_seconds
        self._rows[row.request_id] = row
        self._waiting.append(row)

    def wait_seconds(self) -> float | None:
        """How long the replica may sleep: None until something arrives, 0 when there is work."""
        if self.active:
            return 0.0
        if not self._waiting:
            return None
        if len(self._waiting) >= self.max_batch:
            return 0.0
        return max(0.0, self._window_ends - self._clock())

    def take(self) -> list[RowT]:
        """Move waiting rows into free slots, in order of arrival, and return them."""
        if self.wait_seconds() != 0.0:
            return []
        joining: list[RowT] = []
        longest = 0
        while self._waiting and len(self.active) < self.max_batch:
            longest = max(longest, self._waiting[0].num_prompt_tokens)
            if joining and longest * (len(joining) + 1) > self._max_prefill_tokens:
                break
            row = self._waiting.popleft()
            joining.append(row)
            self.active.append(row)
        return joining

    def slot(self, request_id: str) -> int | None:
        """Return the slot of an active row; None for all others."""
        ids = [row.request_id for row in self.active]
        return ids.index(request_id) if request_id in ids else None

    def end(self, request_id: str) -> RowT | None:
        """Take a request out, wherever it is; None when it has ended before or never came.

        The last active row moves into the slot that becomes free, as it does in the cache.
        """
        slot = self.slot(request_id)
        row = self._rows.pop(request_id, None)
        if row is None:
            return None
        if slot is not None:
            last = self.active.pop()
            if slot < len(self.active):
                self.active[slot] = last
        else:
            self._waiting.remove(row)
        return row
