"""Pipeline schedules as a picture: who computes what when, and how much stands still (ranks).

Pure: no process group, no model. A forward takes 1 unit of time, a backward 2; where a schedule
splits the backward, its two halves (input, weights) take 1 each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SCHEDULES", "ScheduleGrid", "Slot", "schedule_grid"]

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
"""nbdist's name of a schedule -> torch's. The first two take one stage a rank, the others two."""

_UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}
_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
_COLORS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#e0ac2b"}


@dataclass(frozen=True, slots=True)
class Slot:
    """One computation: kind F, B, I or W (backward of the input, of the weights)."""

    rank: int
    stage: int
    kind: str
    micro_batch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ScheduleGrid:
    """A schedule laid out in time. In a notebook it shows itself.

    Attributes:
        name: of the schedule.
        num_ranks: ranks on `pp`.
        slots: all computations.
    """

    name: str
    num_ranks: int
    slots: tuple[Slot, ...]

    @property
    def length(self) -> int:
        """Units of time until all is done."""
        return max(slot.stop for slot in self.slots)

    @property
    def bubble_fraction(self) -> float:
        """Part of the ranks' time in which they stand still, 0 to 1."""
        busy = sum(slot.stop - slot.start for slot in self.slots)
        return 1 - busy / (self.length * self.num_ranks)

    def __str__(self) -> str:
        """Return a line a rank: F forward, B backward, I and W its halves, `.` stands still."""
        wide = max(len(str(slot.micro_batch)) for slot in self.slots) + 1
        rows = [["." * wide] * self.length for _ in range(self.num_ranks)]
        for slot in self.slots:
            text = f"{slot.kind}{slot.micro_batch}"
            for at in range(slot.start, slot.stop):
                rows[slot.rank][at] = (text if at == slot.start else "").ljust(wide, "-")
        lines = [f"pp {rank} |{'|'.join(row)}|" for rank, row in enumerate(rows)]
        title = f"{self.name}: {self.bubble_fraction:.0%} of the time is bubble"
        return "\n".join([title, *lines])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def plot(self) -> Figure:
        """Return a figure, a row a rank.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from nbdist.train.metrics import shown_figure

        figure = shown_figure("ScheduleGrid.plot", figsize=(8, 0.5 * self.num_ranks + 1))
        axes = figure.subplots()
        for slot in self.slots:
            width = slot.stop - slot.start
            axes.barh(slot.rank, width, left=slot.start, color=_COLORS[slot.kind], edgecolor="w")
            middle = slot.start + width / 2
            axes.text(middle, slot.rank, f"{slot.kind}{slot.micro_batch}", ha="center", va="center")
        axes.set_yticks(range(self.num_ranks), [f"pp {rank}" for rank in range(self.num_ranks)])
        axes.invert_yaxis()
        axes.set_xlabel("time, in forwards of one stage")
        axes.set_title(f"{self.name}: {self.bubble_fraction:.0%} bubble")
        return figure


def schedule_grid(
    schedule: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int | None = None
) -> ScheduleGrid:
    """Return a schedule laid out in time: each rank computes as soon as its input is there.

    Args:
        schedule: "gpipe", "1f1b", "interleaved", "zero_bubble" or "zbv".
        num_ranks: ranks on `pp`.
        num_micro_batches: that the rows of a step are cut into.
        stages_per_rank: 1 for the first two, 2 for the others when None.

    Raises:
        ValueError: an unknown schedule, or numbers it does not take.
    """
    check_schedule(schedule)
    if num_ranks < 1 or num_micro_batches < 1:
        raise ValueError(
            f"a schedule over pp={num_ranks} ranks and num_micro_batches={num_micro_batches} was "
            "asked for; set both >= 1"
        )
    if schedule in ("gpipe", "1f1b"):
        queues = {
            rank: _single(schedule, rank, num_ranks, num_micro_batches) for rank in range(num_ranks)
        }
    else:
        queues = _orders_of_torch(schedule, num_ranks, num_micro_batches, stages_per_rank)
    num_stages = 1 + max(stage for queue in queues.values() for stage, _, _ in queue)
    return ScheduleGrid(schedule, num_ranks, _lay_out(queues, num_stages))


def check_schedule(schedule: str) -> None:
    """Refuse an unknown name."""
    if schedule not in SCHEDULES:
        raise ValueError(
            f"schedule={schedule!r} is unknown; set one of {', '.join(map(repr, SCHEDULES))}"
        )


def _single(
    schedule: str, rank: int, num_ranks: int, num_micro_batches: int
) -> list[tuple[int, str, int]]:
    """Return a rank's order where it has one stage; torch's table of 1F1B leaves out a forward."""
    ahead = num_micro_batches if schedule == "gpipe" else num_ranks - 1 - rank
    ahead = min(ahead, num_micro_batches)
    order = [(rank, "F", index) for index in range(ahead)]
    for index in range(num_micro_batches - ahead):
        order += [(rank, "F", ahead + index), (rank, "B", index)]
    first_left = num_micro_batches - ahead
    return order + [(rank, "B", index) for index in range(first_left, num_micro_batches)]


def _orders_of_torch(
    schedule: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int | None
) -> dict[int, list[tuple[int, str, int]]]:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    try:
        orders = get_schedule_ops(
            SCHEDULES[schedule], num_ranks, num_micro_batches, stages_per_rank
        )
    except (AssertionError, ValueError) as error:
        raise ValueError(
            f"schedule={schedule!r} does not take pp={num_ranks}, num_micro_batches="
            f"{num_micro_batches}, stages_per_rank={stages_per_rank}: {error}; set "
            f"num_micro_batches to a multiple of {num_ranks}, or another schedule"
        ) from error
    return {rank: _computations(order) for rank, order in enumerate(orders)}


def _computations(order: list[Any]) -> list[tuple[int, str, int]]:
    return [
        (int(action.stage_index), kind, int(action.microbatch_index))
        for action in order
        if action is not None
        and (kind := _KINDS.get(action.computation_type.name)) is not None
        and action.microbatch_index is not None
    ]


def _lay_out(queues: dict[int, list[tuple[int, str, int]]], num_stages: int) -> tuple[Slot, ...]:
    done: dict[tuple[int, str, int], int] = {}
    clock = dict.fromkeys(queues, 0)
    slots = []
    left = {rank: list(queue) for rank, queue in queues.items()}
    while any(left.values()):
        moved = False
        for rank, queue in left.items():
            while queue and (ready := _ready_at(queue[0], done, num_stages)) is not None:
                stage, kind, micro_batch = queue.pop(0)
                start = max(clock[rank], ready)
                clock[rank] = start + _UNITS[kind]
                done[stage, "B" if kind == "I" else kind, micro_batch] = clock[rank]
                slots.append(Slot(rank, stage, kind, micro_batch, start, clock[rank]))
                moved = True
        assert moved, "torch's schedules hold no circle"
    return tuple(sorted(slots, key=lambda slot: (slot.start, slot.rank)))


def _ready_at(
    action: tuple[int, str, int], done: dict[tuple[int, str, int], int], num_stages: int
) -> int | None:
    """Return when the input of a computation is there; None while that is not known."""
    stage, kind, micro_batch = action
    if kind == "F":
        return 0 if stage == 0 else done.get((stage - 1, "F", micro_batch))
    if kind == "W":
        return done.get((stage, "B", micro_batch))
    if stage == num_stages - 1:
        return done.get((stage, "F", micro_batch))
    return done.get((stage + 1, "B", micro_batch))
