"""The ranks of a group replica that compute with the first one and answer nobody (rank)."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

import torch

from nbdist.errors import NbdistError, ServeError
from nbdist.messages import EngineStats
from nbdist.serve.wire import Kind

if TYPE_CHECKING:
    from nbdist.messages import ModelServed
    from nbdist.serve.lockstep import Member
    from nbdist.serve.wire import Wire

__all__ = ["Follower"]

_log = logging.getLogger(__name__)


class Follower:
    """The thread of one such rank; ends when the first rank's replica does.

    Args:
        member: touched by the thread, and by `answer`, in turns.
        served: what the first rank says of the replica.
        wire: for steps at any time.
        turn_wire: for steps between updates.
        device: of the model.
    """

    def __init__(
        self,
        member: Member,
        served: ModelServed,
        *,
        wire: Wire,
        turn_wire: Wire | None,
        device: torch.device,
    ) -> None:
        self.served = served
        self._member = member
        self._wire = wire
        self._turn_wire = turn_wire
        self._device = device
        self._thread = threading.Thread(
            target=self._run, name=f"nbdist-serve-{served.model}-{served.version}", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        s, state = self.served, "serving" if self.running else "stopped"
        first = self._wire.ranks[0]
        return f"Follower(model={s.model!r}, version={s.version}, of rank {first}, {state})"

    @property
    def running(self) -> bool:
        """Whether it computes with the first rank."""
        return self._thread.is_alive()

    def stats(self) -> EngineStats:
        """Return what its part of the engine is doing."""
        engine = self._member.engine
        return EngineStats() if engine is None else engine.stats()

    def stop(self, detail: str = "", *, timeout_seconds: float = 10.0) -> None:
        """End with the first rank; if that does not end by itself, end the replica on all ranks.

        Args:
            detail: why, for the log.
            timeout_seconds: how long to wait for each of the two.
        """
        self._thread.join(timeout_seconds)
        self._member.leaving = detail or f"`stop` was called on rank {self.served.rank} alone"
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            _log.warning("%r is still in a step after %s s", self, 2 * timeout_seconds)

    def turn(self) -> None:
        """Take part in the steps between two updates, on the thread that trains."""
        assert self._turn_wire is not None, "made without a wire for turns"
        kind = Kind.STOP
        try:
            while (kind := self._take_part(self._turn_wire, wait=True)) is Kind.STEP:
                pass
        except (NbdistError, RuntimeError) as error:  # training itself tells of its groups
            kind = Kind.STOP
            _log.warning("%r takes no more turns: %s", self, error)
        finally:
            if kind is Kind.STOP and self._member.weights:
                self._member.weights.close()

    def _run(self) -> None:
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else None
        with on_device or contextlib.nullcontext():
            try:
                while self._take_part(self._wire, wait=False) is not Kind.STOP:
                    pass
            except ServeError as error:
                _log.warning("%r: %s", self, error)
            except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to
                self._member.leaving = f"rank {self.served.rank}: {type(error).__name__}: {error}"
                _log.exception("%r ended", self)
            self._member.close()
            if self._member.weights and self._turn_wire is None:
                self._member.weights.close()

    def _take_part(self, wire: Wire, *, wait: bool) -> Kind:
        told = wire.hear()
        if told.kind is Kind.STEP:
            self._member.step(wire, told, wait=wait, ops=told.ops)
        elif told.kind is Kind.BEAT:
            self._member.beat(wire)
        return told.kind
