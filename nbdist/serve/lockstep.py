"""Engines of several ranks that compute as one (ranks).

Each rank runs the same engine on its part of the weights. What the first rank is asked, it tells
the others; all do the same steps, and only the first one's tokens are sent on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import time
import zlib
from typing import TYPE_CHECKING

from nbdist.errors import NbdistError, ServeError
from nbdist.serve.gate import Gate
from nbdist.serve.live import EngineAround, with_cost
from nbdist.serve.wire import Kind, Op, Told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.messages import EngineStats
    from nbdist.serve.engine import Engine, EngineRequest, TokenOutput
    from nbdist.serve.weights import LiveWeights
    from nbdist.serve.wire import Wire

__all__ = ["Leader", "Member", "ToldClock"]

_log = logging.getLogger(__name__)

_BEAT_SECONDS = 1.0
_RETRY_SECONDS = 0.005


class ToldClock:
    """A clock that stands still between two times that it is told: equal on all ranks of a group.

    Before the first it is the monotonic clock.
    """

    def __init__(self) -> None:
        self._told: float | None = None

    def __call__(self) -> float:
        """Return the time in seconds."""
        return time.monotonic() if self._told is None else self._told

    def tell(self, seconds: float) -> None:
        """Set the time."""
        self._told = seconds


class Member:
    """One rank's part in the steps of a group.

    Args:
        engine: of this rank; built with `clock`, it may use no other clock and no random number.
        clock: of the engine.
        weights: that are trained meanwhile; None when they are not.

    Attributes:
        leaving: set to end the replica on all ranks with the next round; says why.
        made: digest of all tokens that were made.
    """

    def __init__(self, engine: Engine, clock: ToldClock, weights: LiveWeights | None) -> None:
        self.engine: Engine | None = engine
        self.clock = clock
        self.weights = weights
        self.leaving = ""
        self.made = 0
        self._gate = weights.gate if weights else Gate()
        self._is_stale = False

    def close(self) -> None:
        """Let the engine go; another round ends the replica on all ranks."""
        self.leaving = self.leaving or "it was stopped"
        if self.engine is not None:
            self.engine.close()
        self.engine = None

    def beat(self, wire: Wire) -> None:
        """See that all ranks are there. Collective over: the wire.

        Raises:
            ServeError: one of them is leaving.
        """
        self._check(wire.agree([bool(self.leaving)])[0])

    def step(
        self, wire: Wire, told: Told, *, wait: bool, ops: tuple[Op, ...] = ()
    ) -> list[TokenOutput] | None:
        """Do a step if all ranks can now, with equal weights. Collective over: the wire.

        Args:
            wire: to agree on.
            told: by the first rank.
            wait: for this rank's turn, if need be.
            ops: calls to make before it.

        Returns:
            What the step made; None when neither it nor the ops were done.

        Raises:
            ServeError: a rank is leaving, or has made other tokens.
        """
        if told.made != self.made:
            self.leaving = "a rank has made other tokens than the first one"
        with self._gate.serving(wait=wait) as is_mine:
            if not self._agree(wire, is_mine=is_mine):
                return None
            outputs = self._step(told, ops)
        for output in outputs:
            text = f"{self.made} {output.request_id} {output.token_ids}"
            self.made = zlib.crc32(text.encode())
        return outputs

    def _step(self, told: Told, ops: tuple[Op, ...]) -> list[TokenOutput]:
        try:
            engine = self._open_engine()
            for op in ops:
                self.clock.tell(op.at)
                if op.submitted is not None:
                    engine.submit(op.submitted)
                else:
                    engine.cancel(op.cancelled)
            self.clock.tell(told.at)
            return engine.step()
        except Exception as error:  # noqa: BLE001 - told to all ranks with the next round
            _log.exception("a step of a replica of several ranks failed")
            self.leaving = f"{type(error).__name__}: {error}"
            return []

    def _agree(self, wire: Wire, *, is_mine: bool) -> bool:
        weights = self.weights if self.weights and self.weights.is_shared else None
        num_updates = weights.num_updates if weights else 0
        if is_mine and weights and weights.changed():
            self._is_stale = True  # on all ranks, once they agree
        state = (bool(self.leaving), not is_mine, num_updates, -num_updates, self._is_stale)
        failed, is_busy, most, least, is_stale = wire.agree([int(value) for value in state])
        self._check(failed)
        if is_busy or most != -least:
            return False
        if is_stale:
            self._open_engine().new_version()
            self._is_stale = False
        return True

    def _open_engine(self) -> Engine:
        assert self.engine is not None, "a rank that has left agrees to no step"
        return self.engine

    def _check(self, failed: int) -> None:
        if failed:
            why = self.leaving or "another rank has left it; that rank's log says why"
            raise ServeError(f"a replica of several ranks has ended: {why}; call `serve` again")


class Leader(EngineAround):
    """The engine of a group's first rank; its calls reach all ranks.

    Args:
        member: of this rank.
        wire: for steps at any time.
        turn_wire: for steps between updates, on the threads that train.
    """

    def __init__(self, member: Member, wire: Wire, turn_wire: Wire | None = None) -> None:
        assert member.engine is not None, "closed before it began"
        super().__init__(member.engine)
        self.member = member
        self._wire = wire
        self._turn_wire = turn_wire
        self._ops: list[Op] = []
        self._is_turn = self._is_over = False
        self._beat_at = self._retry_at = 0.0

    def submit(self, request: EngineRequest) -> None:
        """See `Engine.submit`; all ranks draw from one seed."""
        if request.sampling.seed is None:
            drawn = random.SystemRandom().getrandbits(62)
            sampling = dataclasses.replace(request.sampling, seed=drawn)
            request = dataclasses.replace(request, sampling=sampling)
        now = self._now()
        super().submit(request)
        self._ops.append(Op(at=now, submitted=request))

    def cancel(self, request_id: str) -> bool:
        """See `Engine.cancel`."""
        now = self._now()
        is_known = super().cancel(request_id)
        if is_known:
            self._ops.append(Op(at=now, cancelled=request_id))
        return is_known

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let the training thread call `step` between two updates. Collective over: the group."""
        assert self._turn_wire is not None, "made without a wire for turns"
        self._is_turn = True
        try:
            yield
            self._turn_wire.tell(Told(Kind.END))
        finally:
            self._is_turn = False

    def step(self) -> list[TokenOutput]:
        """See `Engine.step`; without work the other ranks hear that this one is there."""
        try:
            now = self._now()
            if self._has_work():
                return self._step_together(now)
            if now >= self._beat_at and not self._is_turn:
                self._wire.tell(Told(Kind.BEAT))
                self.member.beat(self._wire)
                self._beat_at = now + _BEAT_SECONDS
        except BaseException:
            self._is_over = True
            raise
        return []

    def wait_seconds(self) -> float | None:
        """See `Engine.wait_seconds`."""
        now = self._now()
        wait = super().wait_seconds()
        if self._is_turn:
            return wait
        beat = max(0.0, self._beat_at - now)
        if wait is None and not self._ops:
            return beat
        weights = self.member.weights
        held = weights.wait_seconds() if weights else 0.0
        return min(beat, max(wait or 0.0, held, self._retry_at - now))

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        weights = self.member.weights
        return with_cost(super().stats(), weights) if weights else super().stats()

    def close(self) -> None:
        """See `Engine.close`; the other ranks end as well."""
        if not self._is_over:
            self._is_over = True
            with contextlib.suppress(RuntimeError, NbdistError):  # the group is gone, and they know
                self._wire.tell(Told(Kind.STOP))
        if self.member.weights and self._turn_wire is None:
            self.member.weights.close()
        super().close()

    def dismissal(self) -> Callable[[], None]:
        """Return what tells the training threads of the other ranks to wait for turns no more."""
        weights, wire = self.member.weights, self._turn_wire

        def dismiss() -> None:
            if weights is not None:
                weights.close()
            if wire is not None:
                with contextlib.suppress(
                    RuntimeError, NbdistError
                ):  # the group is gone, and they know
                    wire.tell(Told(Kind.STOP))

        return dismiss

    def _now(self) -> float:
        now = time.monotonic()
        self.member.clock.tell(now)
        return now

    def _has_work(self) -> bool:
        weights = self.member.weights
        if weights and not self._is_turn and weights.wait_seconds() > 0:
            return False
        return bool(self._ops) or super().wait_seconds() == 0.0

    def _step_together(self, now: float) -> list[TokenOutput]:
        wire = self._turn_wire if self._is_turn else self._wire
        assert wire is not None, "made without a wire for turns"
        told = Told(Kind.STEP, now, self.member.made, tuple(self._ops))
        wire.tell(told)
        outputs = self.member.step(wire, told, wait=self._is_turn)
        self._beat_at = now + _BEAT_SECONDS
        if outputs is None:
            self._retry_at = now + _RETRY_SECONDS
            return []
        self._ops.clear()
        return outputs
