"""Changes the number of ranks of a world that runs (client)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nbdist.cluster.death import tell_deaths
from nbdist.cluster.healing import Healing, check_idle, end_ranks
from nbdist.cluster.launch import Processes
from nbdist.cluster.places import Places, plan_places
from nbdist.cluster.replacing import start_processes
from nbdist.errors import NbdistError
from nbdist.messages import RankInfo, TakePlace

__all__ = ["Resized", "Resizing", "check_number"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """What `World.resize` has done.

    Attributes:
        before: number of ranks before it.
        after: number of ranks now.
        places: who was started, has ended or has another number.
        trainers: trainers that go on, and where the state came from, by name.
        behind: why others are of the old process group still, by name.
        missing: names that the new ranks lack, while others have them.
        seconds: how long it took.
    """

    before: int
    after: int
    places: Places
    trainers: dict[str, str] = field(default_factory=dict)
    behind: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    seconds: float = 0.0


class Resizing(Healing):
    """The part of `World` that changes the number of ranks."""

    def resize(
        self, num_ranks: int, on_stage: Callable[[str], None] | None = None
    ) -> Resized | None:
        """Change the number of ranks between cells; see `Running.resize`."""
        with self._lock:
            return self._resize(num_ranks, on_stage)

    def _resize(self, num_ranks: int, on_stage: Callable[[str], None] | None) -> Resized | None:
        self._check_alive(())
        started = time.monotonic()
        tell = on_stage or (lambda _text: None)
        before = self.record.num_ranks
        check_idle(self._link, before, ())
        alive = sorted(set(range(before)) - self._link.lost_ranks)
        if num_ranks == before == len(alive):
            return None
        places = plan_places(alive, num_ranks)
        self._hand_over(alive, places, num_ranks, tell)
        self._change(places, num_ranks, tell)
        tell("making and verifying the process group")
        self._remake_group()
        resized = self._take_up(before, places, started, tell)
        (self._processes or Processes.of(self.record)).start_spares()
        return resized

    def _hand_over(
        self, alive: list[int], places: Places, num_ranks: int, tell: Callable[[str], None]
    ) -> None:
        """Have the living ranks copy what others will need; touches nothing else."""
        from nbdist.rank import resizing

        if not alive:
            raise NbdistError(
                f"{num_ranks} ranks were asked for, but none of this world's is left to go on "
                "from; `%distributed heal` starts them"
            )
        [found] = self._objects.apply(resizing.problems, (num_ranks,), alive[:1])
        if found:
            raise NbdistError(
                f"{num_ranks} ranks were asked for, but a trainer on the ranks cannot go on with "
                f"them: {'; '.join(found)}; or take its name away first: `del` in a cell"
            )
        tell("copying the trainers' state")
        is_whole = not self._group_broken and len(alive) == self.record.num_ranks
        args = (places.leaving,)
        self._objects.apply(resizing.hand_over, args, alive, can_talk=is_whole)

    def _change(self, places: Places, num_ranks: int, tell: Callable[[str], None]) -> None:
        """Start and end processes, and give every rank its number."""
        record, before = self.record, self.record.num_ranks
        # Whatever stops this half-way: the next cell begins with a group of all ranks.
        self._group_broken = True
        lost = sorted(self._link.lost_ranks)
        stay = {i.rank: i for i in self.infos if i.rank not in self._link.lost_ranks}
        record.num_ranks = num_ranks
        try:
            if places.new:
                self._start(places.new, [stay[rank] for rank in sorted(stay)], tell)
        except BaseException:
            record.num_ranks = before
            record.save()
            self._link.relabel({}, before)
            raise
        if places.leaving:
            tell(f"ending rank {', '.join(map(str, places.leaving))}")
            end_ranks(self._link, self.infos, places.leaving)
        # Their supervisors look at the ranks' files before they report; these change next.
        tell_deaths(Path(record.directory), self.infos, [*lost, *places.leaving])
        self._number(places, num_ranks)

    def _start(self, new: Sequence[int], stay: list[RankInfo], tell: Callable[[str], None]) -> None:
        used = {info.local_rank for info in stay}
        free = [place for place in range(len(used) + len(new)) if place not in used]
        made = [
            RankInfo(
                rank=rank,
                world_size=self.record.num_ranks,
                local_rank=local_rank,
                host=stay[0].host,
                pid=-1,
                device="",
            )
            for rank, local_rank in zip(new, free, strict=False)
        ]
        processes = self._processes or Processes.of(self.record)
        start_processes(processes, self._link, [*stay, *made], new, tell)

    def _number(self, places: Places, num_ranks: int) -> None:
        """Tell the living ranks their numbers, and use these from now on."""
        infos = {i.rank: i for i in self.infos if i.rank not in self._link.lost_ranks}
        for rank, info in infos.items():
            if rank not in places.new:
                number = places.moves.get(rank, rank)
                place = TakePlace(
                    rank=number, local_rank=info.local_rank, world_size=self.record.num_ranks
                )
                self._link.post(rank, place)
        self._link.relabel(places.moves, num_ranks)
        self._objects.relabel(places.moves, range(num_ranks), places.new)
        numbers = {rank: places.moves.get(rank, rank) for rank in infos}
        self.infos = [
            dataclasses.replace(infos[rank], rank=number, world_size=num_ranks)
            for rank, number in sorted(numbers.items(), key=lambda pair: pair[1])
            if number < num_ranks
        ]
        for path in Path(self.record.directory, "ranks").glob("[0-9]*.json"):
            if int(path.stem) >= num_ranks:
                path.unlink()
        self.record.save()

    def leave_out(self, gone: Collection[int]) -> None:
        """Have a world without ranks that a cell has gone on without; the others move up."""
        alive = sorted(set(range(self.record.num_ranks)) - self._link.lost_ranks - set(gone))
        if not gone or not alive:
            return
        places = plan_places(alive, len(alive))
        tell_deaths(Path(self.record.directory), self.infos, sorted(gone))
        self.record.num_ranks = len(alive)
        self._number(places, len(alive))

    def _take_up(
        self, before: int, places: Places, started: float, tell: Callable[[str], None]
    ) -> Resized:
        from nbdist.rank import resizing

        tell("giving names and state to the ranks")
        ranks = range(self.record.num_ranks)
        moved = self._objects.apply(resizing.take_up, (places.new,), ranks)
        missing = {name for one in moved for name in one.missing}
        return Resized(
            before=before,
            after=self.record.num_ranks,
            places=places,
            trainers=moved[0].trainers,
            behind=moved[0].behind,
            missing=tuple(sorted(missing)),
            seconds=time.monotonic() - started,
        )


def check_number(num_ranks: int) -> None:
    """Raise ValueError when this is no number of ranks."""
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise ValueError(
            f"num_ranks={num_ranks!r} is not a number of ranks; give an integer of at least 1, "
            "such as `%distributed resize -n 2`"
        )
