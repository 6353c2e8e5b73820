"""How a rank takes part in serving: alone, as the first of several, or with the first (rank)."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.messages import ModelServed
from nbdist.serve.answering import Replica
from nbdist.serve.batcher import Batcher
from nbdist.serve.desk import desk_of
from nbdist.serve.follower import Follower
from nbdist.serve.live import LiveEngine
from nbdist.serve.lockstep import Leader, Member

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from nbdist.serve.crew import Crew
    from nbdist.serve.engine import Engine
    from nbdist.serve.ports import RankPort
    from nbdist.serve.weights import LiveWeights

__all__ = ["Seat"]


@dataclass(frozen=True, slots=True)
class Seat:
    """What a rank serves with.

    Attributes:
        engine: runs the model, or this rank's part of it.
        device: of the model.
        crew: the ranks that run it together; None when this one does alone.
        weights: that are trained meanwhile; None where that need not be known.
        port: the rank's way to the client.
        weights_bytes: that this rank holds of the model.
    """

    engine: Engine
    device: torch.device
    crew: Crew | None
    weights: LiveWeights | None
    port: RankPort
    weights_bytes: int

    def take(
        self, name: str, tokenizer: Tokenizer, end_token_id: int | None, turn_steps: int
    ) -> Replica | Follower:
        """Begin to answer for a name, or to compute with the rank that does.

        Args:
            name: of the model.
            tokenizer: of the model.
            end_token_id: ends an answer.
            turn_steps: most steps after an update, where steps wait for updates.
        """
        limits = self.engine.limits
        served = ModelServed(
            rank=self.port.rank,
            model=name,
            version=desk_of(self.port).next_version(name),
            max_batch=limits.max_batch,
            context_length=limits.context_length,
            engine=self.engine.name,
            weights_bytes=self.weights_bytes,
        )
        if self.crew and not self.crew.is_first:
            return self._follow(self.crew, served)
        engine = self._around()
        batcher = Batcher(
            engine,
            tokenizer,
            emit=self.port.emit,
            end_token_id=end_token_id,
            rank=self.port.rank,
        )
        desk = desk_of(self.port)
        replica = Replica(batcher, served, on_end=desk.remove, device=self.device)
        desk.install(replica)
        if self.weights and self.weights.between_steps:
            assert isinstance(engine, Leader | LiveEngine), "others take no turns"
            self._take_turns(replica, engine, self.weights, turn_steps)
        return replica

    def _around(self) -> Engine:
        if self.crew:
            member = Member(self.engine, self.crew.clock, self.weights)
            return Leader(member, self.crew.wire, self.crew.turn_wire)
        return LiveEngine(self.engine, self.weights) if self.weights else self.engine

    def _follow(self, crew: Crew, served: ModelServed) -> Follower:
        """Compute with the first rank from now on, and answer for this name no more."""
        ended = f"version {served.version} is served by ranks {crew.ranks}; send it again"
        desk_of(self.port).end(served.model, ended)
        member = Member(self.engine, crew.clock, self.weights)
        follower = Follower(
            member, served, wire=crew.wire, turn_wire=crew.turn_wire, device=self.device
        )
        if self.weights and crew.turn_wire:
            self.weights.after_update = follower.turn
        return follower

    @staticmethod
    def _take_turns(
        replica: Replica, engine: Leader | LiveEngine, weights: LiveWeights, max_steps: int
    ) -> None:
        # the other ranks hear of the end at an update; the engine must not be kept until then
        known, dismiss = weakref.ref(engine), engine.dismissal()

        def turn() -> None:
            present = known()
            if present is None or not replica.answer(present.turn(), max_steps):
                dismiss()

        weights.after_update = turn
