"""Which tokens the next step computes: decoders, then pieces of prompts (torch-free, anywhere).

It holds no lock: one thread, the engine's, calls it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from nbdist.errors import Overloaded
from nbdist.serve.sequence import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.serve.blocks import BlockPool
    from nbdist.serve.sequence import Sequence

__all__ = ["Scheduler"]


class Scheduler:
    """Continuous batching over a paged cache.

    A step computes one token (and its draft) of *every* row that decodes, and fills what is left
    of its token budget with pieces of prompts, in order of arrival. So a long prompt never holds
    a decoder up for more than one step. When blocks run out, the newest row gives its blocks back
    and waits at the head of the queue; its tokens are kept and computed again later. The oldest
    row is never taken: something always moves on.

    A request is in exactly one place: waiting, running, or ended. `end` is the only way out, and
    hands a sequence out once.

    Args:
        pool: the blocks.
        max_batch: most rows that run together.
        max_waiting: most requests that may wait beyond them.
        max_step_tokens: token budget of a step; decoders are served even beyond it.
        window_seconds: an idle engine waits this long after the first request for others, so that
            a burst begins together. While rows run nobody waits.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch: int,
        max_waiting: int,
        max_step_tokens: int,
        window_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        if max_batch < 1 or max_waiting < 0 or window_seconds < 0 or max_step_tokens < 1:
            raise ValueError(
                f"max_batch={max_batch}, max_waiting={max_waiting}, window_seconds="
                f"{window_seconds}, max_step_tokens={max_step_tokens}: an engine needs max_batch "
                "and max_step_tokens >= 1 and the others >= 0"
            )
        self.pool = pool
        self.max_batch = max_batch
        self.max_waiting = max_waiting
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preempted = 0
        self.num_prompt_tokens = 0
        self.num_prefix_tokens = 0
        self._max_step_tokens = max_step_tokens
        self._window_seconds = window_seconds
        self._clock = clock
        self._all: dict[str, Sequence] = {}
        self._window_ends = 0.0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._all

    def __len__(self) -> int:
        return len(self._all)

    def submit(self, sequence: Sequence) -> None:
        """Let a request wait for its turn.

        Raises:
            Overloaded: `max_waiting` requests wait already.
            ValueError: a request of this id has not ended yet.
        """
        if sequence.request_id in self._all:
            raise ValueError(f"request {sequence.request_id!r} is already running; use a fresh id")
        depth = len(self._all) - self.max_batch
        if depth >= self.max_waiting:
            raise Overloaded(
                f"{len(self._all)} requests are running or waiting on this replica, and it takes "
                f"max_batch={self.max_batch} + max_waiting={self.max_waiting}; send the request "
                "again when some have ended",
                depth=depth,
                limit=self.max_waiting,
            )
        if not self._all:
            self._window_ends = self._clock() + self._window_seconds
        self._all[sequence.request_id] = sequence
        self.waiting.append(sequence)

    def wait_seconds(self) -> float | None:
        """How long the engine may sleep: None until something arrives, 0 when there is work."""
        if self.running:
            return 0.0
        if not self.waiting:
            return None
        if len(self.waiting) >= self.max_batch:
            return 0.0
        return max(0.0, self._window_ends - self._clock())

    def schedule(self) -> list[Chunk]:
        """Reserve blocks and return what the next step computes; empty when there is nothing."""
        if self.wait_seconds() != 0.0:
            return []
        planned: dict[str, Chunk] = {}
        decoders = [row for row in self.running if row.num_pending == 1]
        prompts = [row for row in self.running if row.num_pending > 1]
        budget = self._max_step_tokens
        for row in decoders:
            budget -= self._plan(row, 1, planned)
        for row in prompts:
            budget -= self._plan(row, budget, planned)
        joining = self._admitted()
        while budget > 0 and (joined := next(joining, None)) is not None:
            budget -= self._plan(joined, budget, planned)
        return list(planned.values())

    def end(self, request_id: str) -> Sequence | None:
        """Take a request out, wherever it is; None when it has ended before or never came."""
        sequence = self._all.pop(request_id, None)
        if sequence is None:
            return None
        if sequence in self.running:
            self.running.remove(sequence)
            self._take_blocks(sequence)
        else:
            self.waiting.remove(sequence)
        return sequence

    def computed(self, chunk: Chunk, num_tokens: int) -> None:
        """Note that the first `num_tokens` of a chunk are in the cache; publish full blocks."""
        row = chunk.sequence
        row.num_computed = chunk.start + num_tokens
        size = self.pool.block_size
        if row.version != self.pool.version:
            return
        for at in range(row.num_published, row.num_computed // size):
            tokens = row.token_ids[at * size : (at + 1) * size]
            row.digest = self.pool.publish(row.digest, tokens, row.blocks[at])
            row.num_published = at + 1

    def _plan(self, row: Sequence, budget: int, planned: dict[str, Chunk]) -> int:
        """Plan a row's next tokens, making room for them; return how many."""
        if row not in self.running or budget < 1:
            return 0
        pending = min(row.num_pending, budget)
        last = pending == row.num_pending
        draft = row.draft if last else []
        if draft and not self._grow(row, row.num_computed + pending + len(draft), spare=True):
            draft = row.draft = []  # a guess is never worth another row's blocks
        while not self._grow(row, row.num_computed + pending):
            victim = self.running[-1]
            self._preempt(victim)
            planned.pop(victim.request_id, None)
            if victim is row:
                return 0
        start = row.num_computed
        tokens = [*row.token_ids[start : start + pending], *draft]
        wanted = 1 + len(draft) if last else 0
        planned[row.request_id] = Chunk(row, start, tokens, wanted)
        return len(tokens)

    def _grow(self, row: Sequence, num_tokens: int, *, spare: bool = False) -> bool:
        missing = self.pool.blocks_for(num_tokens) - len(row.blocks)
        if missing <= 0:
            return True
        if spare and missing + len(self.running) > self.pool.num_free:
            return False
        taken = self.pool.allocate(missing)
        row.blocks.extend(taken or ())
        return taken is not None

    def _admitted(self) -> Iterator[Sequence]:
        """Let waiting requests run, in order, while all that is known of them fits.

        One block a running row stays free, so that the newest row is not thrown out at once.
        """
        while self.waiting and len(self.running) < self.max_batch:
            row = self.waiting[0]
            found = self.pool.find(row.token_ids)
            missing = self.pool.blocks_for(len(row.token_ids) + 1) - len(found)
            if self.running and missing + len(self.running) > self.pool.num_free:
                self.pool.release(found)
                return
            self.waiting.popleft()
            self._begin(row, found)
            self.running.append(row)
            yield row

    def _begin(self, row: Sequence, found: list[int]) -> None:
        size = self.pool.block_size
        row.blocks = found
        row.num_computed = len(found) * size
        row.version = self.pool.version
        row.digest, row.num_published = b"", 0
        grown = self._grow(row, len(row.token_ids))
        assert grown, f"request {row.request_id} was admitted without room for its tokens"
        for at in range(row.num_computed // size):
            tokens = row.token_ids[at * size : (at + 1) * size]
            row.digest = self.pool.publish(row.digest, tokens, row.blocks[at])
            row.num_published = at + 1
        if not row.num_preempted:
            row.first_version = self.pool.version
            self.num_prompt_tokens += len(row.token_ids)
            self.num_prefix_tokens += row.num_computed

    def _preempt(self, row: Sequence) -> None:
        self.running.remove(row)
        self._take_blocks(row)
        row.draft = []
        row.num_preempted += 1
        self.num_preempted += 1
        self.waiting.appendleft(row)

    def _take_blocks(self, row: Sequence) -> None:
        self.pool.release(row.blocks)
        row.blocks = []
        row.num_computed = 0
