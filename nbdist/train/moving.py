"""Takes the trainers that cells have made along when the number of ranks changes (ranks).

Before: every rank copies its state to host memory, and ranks that will end give theirs to others.
After, on the new process group: new ranks get the names of the others, all build the models anew
and take their parts of the state. A trainer goes along when a name of the user's stands for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nbdist.errors import NbdistError
from nbdist.train.mesh import Axis, axis_rank
from nbdist.train.survival.mirror import place_of
from nbdist.train.survival.packing import NAMESPACE
from nbdist.train.survival.recipe import (
    PackedTrainer,
    Recipe,
    known_objects,
    pack_trainer,
    unpack_trainer,
    why_not_rebuilt,
)
from nbdist.train.survival.recovery import go_on_resized
from nbdist.train.survival.state import Slot, layout_of
from nbdist.train.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.ports import PackedNames, SurvivalPort

__all__ = ["Moved", "hand_over", "problems", "take_up"]


@dataclass(slots=True, kw_only=True)
class Moved:
    """What became of trainers and names.

    Attributes:
        trainers: where each one's state came from, by name.
        behind: why others are of the old process group still, by name.
        missing: names that the new ranks lack.
    """

    trainers: dict[str, str] = field(default_factory=dict)
    behind: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


def problems(namespace: dict[str, Any], world_size: int) -> list[str]:
    """Return why trainers cannot go on with so many ranks, in words. Not collective."""
    found = []
    for name, trainer in _trainers(namespace).items():
        if _why_behind(trainer, namespace):
            continue
        try:
            Recipe.of(trainer, trainer.survival.data).for_world(world_size)
        except ValueError as error:
            found.append(f"`{name}`: {error}")
    return found


def hand_over(namespace: dict[str, Any], leaving: Sequence[int], *, can_talk: bool) -> None:
    """Copy the trainers' states, also those that only ranks have that will end.

    Collective over: the default group if ranks are leaving and `can_talk`.

    Args:
        namespace: where cells run.
        leaving: ranks that will end.
        can_talk: the process group is whole.
    """
    trainers = _trainers(namespace)
    for trainer in trainers.values():
        layout, tensors = layout_of(trainer.model, trainer.optimizer)
        layout.locate(trainer.model, trainer.optimizer, axis_rank(trainer.mesh, Axis.PP))
        slot = Slot(layout)
        slot.fill(trainer.step, tensors, trainer.notes())
        trainer.survival.copies = {trainer.step: [slot]}
    if not leaving or not can_talk:
        return
    mine = {n: (t.step, place_of(t.model, t.mesh)) for n, t in trainers.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for name in sorted(set.intersection(*map(set, everyone))):
        if len({told[name][0] for told in everyone}) == 1:
            _send(trainers[name], leaving, [told[name][1] for told in everyone])


def _send(trainer: Trainer, leaving: Sequence[int], places: list[tuple[int, ...]]) -> None:
    """Give the states of ranks that will end to others, unless these have equal weights."""
    copies = trainer.survival.copies[trainer.step]
    staying = [rank for rank in range(len(places)) if rank not in leaving]
    for number, source in enumerate(leaving):
        if places[source] in [places[rank] for rank in staying]:
            continue
        target = staying[number % len(staying)]
        if dist.get_rank() == source:
            dist.send_object_list([copies[0].layout], dst=target)
            dist.send(copies[0].flat, target)
        elif dist.get_rank() == target:
            layout: list[Any] = [None]
            dist.recv_object_list(layout, src=source)
            slot = Slot(layout[0])
            dist.recv(slot.flat, source)
            copies.append(slot)


def take_up(port: SurvivalPort, new: Sequence[int]) -> Moved:
    """Go on with another number of ranks. Collective over: the default group.

    Args:
        port: of this rank.
        new: ranks whose process has been started for it.

    Returns:
        What became of all; equal on all ranks, but for `missing`.
    """
    is_new = dist.get_rank() in new
    trainers = {} if is_new else _trainers(port.namespace)
    moved, names = _agree(trainers, port.namespace, is_new=is_new)
    olds = {n: known_objects(t, t.survival.data) for n, t in trainers.items() if n in names}
    recipes = {n: _recipe(trainers[n]) for n in olds}
    packed: list[Any] = [None]
    source = next(rank for rank in range(dist.get_world_size()) if rank not in new)
    if new:
        if dist.get_rank() == source:
            packed = [_pack(recipes, trainers, olds, port)]
        dist.broadcast_object_list(packed, src=source)
    for name in names:
        if is_new:
            trainers[name], _ = unpack_trainer(packed[0][0][name], port.namespace)
        _settle(name, trainers[name], recipes.get(name), moved)
    for name, old in olds.items():
        now = known_objects(trainers[name], trainers[name].survival.data)
        port.rebind([(old[what], now[what]) for what in ("model", "bare", "optimizer", "mesh")])
    if is_new:
        known = {n: known_objects(trainers[n], trainers[n].survival.data) for n in names}
        moved.missing = port.unpack_names(packed[0][1], _flat(known, port))
    return moved


def _agree(
    trainers: dict[str, Trainer], namespace: dict[str, Any], *, is_new: bool
) -> tuple[Moved, list[str]]:
    """Return the names of trainers that all old ranks can take along, and why not the others."""
    mine = {
        name: (trainer.step, _why_behind(trainer, namespace)) for name, trainer in trainers.items()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, None if is_new else mine)
    told = [one for one in everyone if one is not None]
    moved, names = Moved(), []
    for name in sorted({name for one in told for name in one}):
        states = {one.get(name) for one in told}
        if len(states) > 1:
            moved.behind[name] = "the ranks have it at different steps, or not all have it"
        elif why := next(iter(states))[1]:
            moved.behind[name] = why
        else:
            names.append(name)
    return moved, names


def _settle(name: str, trainer: Trainer, recipe: Recipe | None, moved: Moved) -> None:
    """Build a trainer anew, unless it is new, and give it its state."""
    copies, trainer.survival.copies = trainer.survival.copies, {}
    if recipe is not None:
        trainer.config = recipe.config
        trainer.assemble(*recipe.build())
    try:
        outcome = go_on_resized(trainer, copies)
    except NbdistError as error:
        trainer.updating = True  # it has no weights: fit() says so
        moved.behind[name] = str(error)
    else:
        trainer.history.forget_after(outcome.step)
        moved.trainers[name] = outcome.source


def _recipe(trainer: Trainer) -> Recipe:
    return Recipe.of(trainer, trainer.survival.data).for_world(dist.get_world_size())


def _pack(
    recipes: dict[str, Recipe],
    trainers: dict[str, Trainer],
    olds: dict[str, dict[str, Any]],
    port: SurvivalPort,
) -> tuple[dict[str, PackedTrainer], PackedNames]:
    made = {n: pack_trainer(r, trainers[n], port.namespace) for n, r in recipes.items()}
    return made, port.pack_names(_flat(olds, port))


def _flat(known: dict[str, dict[str, Any]], port: SurvivalPort) -> dict[str, Any]:
    """Return the objects of several trainers, by names that all ranks use."""
    by_name = {f"{n}.{what}": one for n, found in known.items() for what, one in found.items()}
    return by_name | {NAMESPACE: port.namespace}


def _trainers(namespace: dict[str, Any]) -> dict[str, Trainer]:
    """Return the trainers that names stand for, once each."""
    found: dict[int, tuple[str, Trainer]] = {}
    for name, value in sorted(namespace.items()):
        if isinstance(value, Trainer) and not name.startswith("_"):
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def _why_behind(trainer: Trainer, namespace: dict[str, Any]) -> str:
    if trainer.updating:
        return "its last fit() was cut inside an update"
    return why_not_rebuilt(trainer, trainer.survival.data, namespace)
