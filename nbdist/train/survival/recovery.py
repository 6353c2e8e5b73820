"""Goes on with a run on a new process group: the survivors and the new ranks together (ranks)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nbdist.errors import NbdistError
from nbdist.train.beginning import newest_for_all
from nbdist.train.rng import seed_rng
from nbdist.train.survival.choice import Choice, choose
from nbdist.train.survival.mirror import Mirror, Offer, place_of
from nbdist.train.survival.reshard import Copies, reshard
from nbdist.train.survival.state import DATA_AT, Slot, restore

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.ports import PackedNames
    from nbdist.train.survival.recipe import PackedTrainer
    from nbdist.train.trainer import Trainer

_Shared = tuple["PackedTrainer", "PackedNames"]

__all__ = ["Outcome", "go_on", "go_on_resized", "share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run goes on.

    Attributes:
        mirror: of the new group.
        step: the run goes on after it.
        source: "memory of peers", or the path of a checkpoint.
    """

    mirror: Mirror
    step: int
    source: str


def share(pack: Callable[[], _Shared] | None) -> _Shared:
    """Return a survivor's packed trainer and names. Collective over: all ranks.

    Args:
        pack: makes them, on one of the ranks that have them; None on a new rank.

    Raises:
        NbdistError: no rank has them.
    """
    everyone: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(everyone, pack is not None)
    if not any(everyone):
        raise NbdistError(
            "a run was to go on after a failure, but no rank of it is left; run the cell again "
            'with fit(resume="auto")'
        )
    source = everyone.index(True)
    packed: list[Any] = [None]
    if pack is not None and dist.get_rank() == source:
        packed = [pack()]
    dist.broadcast_object_list(packed, src=source)
    shared: _Shared = packed[0]
    return shared


def go_on(trainer: Trainer, mirror: Mirror | None, steps_done: int) -> Outcome:
    """Restore a trainer that has been built anew, and verify it. Collective over: all ranks.

    Args:
        trainer: on the new group.
        mirror: of the old group; None on a new rank.
        steps_done: by this rank before the failure; 0 on a new rank.

    Raises:
        NbdistError: there is nothing to go on from, or the restored state is not what was saved.
    """
    offer = mirror.offer(steps_done) if mirror else _nothing(trainer)
    offers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(offers, offer)
    choice = choose(offers)
    if choice is None:
        return _from_checkpoint(trainer)
    slot = _slot_for(choice, mirror)
    source = choice.sources.get(dist.get_rank())
    return _restored(trainer, slot, has_rng=source is None or source.rng_rank is not None)


def go_on_resized(trainer: Trainer, copies: Copies) -> Outcome:
    """Restore a trainer on a mesh of another size. Collective over: all ranks.

    A rank that stays keeps its random states; a new one begins from (seed, step, rank).

    Args:
        trainer: on the new mesh.
        copies: see `reshard`.

    Raises:
        NbdistError: as `go_on`.
    """
    slot = reshard(trainer, copies)
    if slot is None:
        return _from_checkpoint(trainer)
    return _restored(trainer, slot, has_rng=bool(copies))


def _restored(trainer: Trainer, slot: Slot, *, has_rng: bool) -> Outcome:
    step = slot.step
    assert step is not None, "a whole state"
    if step > 0:
        trainer.warm_up()
    restore(slot, trainer.model, trainer.optimizer)
    trainer.take_notes(step, slot.notes.tolist())
    fresh = Mirror(trainer.model, trainer.optimizer, trainer.mesh)
    fresh.take(step, slot.notes.tolist())
    _verify(trainer, slot.digest, fresh.own_at(step).digest)
    if has_rng:
        slot.restore_rng()
    else:
        seed_rng(trainer.config.seed, step, dist.get_rank())
    return Outcome(mirror=fresh, step=step, source="memory of peers")


def _nothing(trainer: Trainer) -> Offer:
    place = place_of(trainer.model, trainer.mesh)
    return Offer(place=place, step=0, own=(), neighbour=None, kept=(), is_whole=False)


def _slot_for(choice: Choice, mirror: Mirror | None) -> Slot:
    """Return this rank's state of the chosen step; it is sent to new ranks meanwhile."""
    rank = dist.get_rank()
    slot = None if rank in choice.sources or mirror is None else mirror.own_at(choice.step)
    for new, source in sorted(choice.sources.items()):
        if rank == source.rank:
            assert mirror is not None, "a source has copies"
            sent = mirror.own_at(choice.step) if source.is_own else mirror.kept_at(choice.step)
            dist.send_object_list([sent.layout], dst=new)
            dist.send(sent.flat, new)
        elif rank == new:
            layout: list[Any] = [None]
            dist.recv_object_list(layout, src=source.rank)
            slot = Slot(layout[0])
            dist.recv(slot.flat, source.rank)
            slot.is_valid = True
        # Of a rank with equal weights the random states are its own.
        if source.is_own and source.rng_rank is not None:
            if rank == source.rng_rank:
                assert mirror is not None, "a source has copies"
                dist.send(mirror.kept_at(choice.step).flat[:DATA_AT], new)
            elif rank == new:
                assert slot is not None, "received above"
                dist.recv(slot.flat[:DATA_AT], source.rng_rank)
    assert slot is not None, "an old rank has its own, a new one has received"
    return slot


def _from_checkpoint(trainer: Trainer) -> Outcome:
    where = trainer.config.checkpoint
    path = newest_for_all(where) if where is not None else None
    if path is None:
        raise NbdistError(
            "a run was to go on after a failure, but the state of a lost rank was in no other "
            "rank's memory, and there is no checkpoint; run the cell again from the start, and "
            "set TrainConfig.checkpoint for the next time"
        )
    records = trainer.history.records
    trainer.load(path)
    trainer.history.records[:] = records
    mirror = Mirror(trainer.model, trainer.optimizer, trainer.mesh)
    mirror.take(trainer.step, trainer.notes())
    return Outcome(mirror=mirror, step=trainer.step, source=str(path))


def _verify(trainer: Trainer, saved: int, found: int) -> None:
    """Compare what the ranks have now with what was saved, and with each other.

    Raises:
        NbdistError: on all ranks, naming what differs.
    """
    ids = getattr(trainer.data, "sample_ids", None)
    weights = place_of(trainer.model, trainer.mesh)
    samples = tuple(ids(trainer.step)) if ids else ()
    mine = (trainer.step, saved, found, weights, trainer.data_place, samples)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    problems = []
    seen: dict[Any, Any] = {}
    for rank, (step, was, now, place, data_place, rows) in enumerate(everyone):
        if step != everyone[0][0]:
            problems.append(f"rank {rank} is at step {step}, rank 0 at {everyone[0][0]}")
        if was != now:
            problems.append(f"rank {rank} has other tensors than its copy")
        for what, where, value in (("weights", place, now), ("samples", data_place, rows)):
            if seen.setdefault((what, where), value) != value:
                problems.append(f"rank {rank} has other {what} than a rank that should have equal")
    if problems:
        raise NbdistError(
            f"a run was restored after a failure, but not as it was: {'; '.join(problems)}; load "
            "the newest checkpoint with resume()"
        )
