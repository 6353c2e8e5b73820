"""How much of a step's communication lies under its computation, from a profile (ranks)."""

from __future__ import annotations

import itertools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nbdist.train.steps import ForwardBackward

if TYPE_CHECKING:
    from nbdist.train.trainer import Trainer

__all__ = ["OverlapReport", "OverlapStep", "overlap_report"]

_STEP = "nbdist step "
_WIDTH = 72  # characters of a timeline

Spans = list[tuple[float, float]]
"""Beginnings and ends in microseconds, in order and apart from each other."""


@dataclass(frozen=True, slots=True)
class OverlapStep:
    """Forward and backward of one step on this rank.

    Attributes:
        span: beginning and end, microseconds.
        computation: when an operator ran.
        communication: when a collective was under way.
    """

    span: tuple[float, float]
    computation: Spans
    communication: Spans

    @property
    def fraction(self) -> float:
        """Share of the communication's time that lies under computation; 0.0 without any."""
        under = _total(_common(self.computation, self.communication))
        return under / _total(self.communication) if self.communication else 0.0

    def timeline(self) -> str:
        """Return two lines of text over the step's time: what computed and what travelled."""
        rows = (("compute", self.computation), ("traffic", self.communication))
        return "\n".join(f"{name} |{self._row(spans)}|" for name, spans in rows)

    def _row(self, spans: Spans) -> str:
        begin, end = self.span
        edges = [begin + (end - begin) * i / _WIDTH for i in range(_WIDTH + 1)]
        cells = itertools.pairwise(edges)
        shares = [_total(_common(spans, [cell])) / (cell[1] - cell[0]) for cell in cells]
        return "".join("#" if share > 0.5 else "-" if share > 0 else " " for share in shares)


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """The profiled steps of this rank; its text is a summary and the last step's timeline.

    Attributes:
        steps: in order.
        trace: the Chrome trace, for chrome://tracing or https://ui.perfetto.dev; None if not kept.
    """

    steps: list[OverlapStep]
    trace: Path | None

    @property
    def fraction(self) -> float:
        """Mean of the steps' fractions."""
        return sum(step.fraction for step in self.steps) / len(self.steps)

    def __repr__(self) -> str:
        lines = [
            f"step {number}: {(step.span[1] - step.span[0]) / 1e3:.1f} ms, "
            f"computation {_total(step.computation) / 1e3:.1f} ms, communication "
            f"{_total(step.communication) / 1e3:.1f} ms, "
            f"{step.fraction:.0%} of it under computation"
            for number, step in enumerate(self.steps, 1)
        ]
        return "\n".join([*lines, self.steps[-1].timeline()])


def overlap_report(
    trainer: Trainer, *, steps: int = 3, trace: str | Path | None = None
) -> OverlapReport:
    """Profile forward and backward of some steps. Collective over: all ranks.

    The trainer stays as it was: weights, step and random states. Only PowerSGD's hook counts the
    steps. On CPUs computation is the time of operators that call no others, and communication is
    that of gloo's threads; on GPUs both are kernels. The profiler slows small operators down.

    Args:
        trainer: at any step.
        steps: number of steps to profile, after one that is not.
        trace: file for this rank's Chrome trace; name it by rank.

    Raises:
        ValueError: `steps` is below 1.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} leaves nothing to profile; set steps >= 1")
    device = torch.device(trainer.mesh.device_type)
    run = ForwardBackward(trainer.model, trainer.mesh, trainer.config, trainer.timing.clock)
    inputs, targets = (part.to(device) for part in trainer.data.batch(trainer.step))
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    trainer.model.train()
    with torch.random.fork_rng():
        run(inputs, targets, lambda _: None)
        with profile(activities=activities) as profiler:
            for index in range(steps):
                with record_function(f"{_STEP}{index}"):
                    run(inputs, targets, lambda _: None)
                    if device.type == "cuda":
                        torch.cuda.synchronize()
    trainer.optimizer.zero_grad()
    with tempfile.TemporaryDirectory(prefix="nbdist-trace-") as directory:
        path = Path(directory, "trace.json") if trace is None else Path(trace)
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return OverlapReport(_steps_of(events), None if trace is None else Path(trace))


def _steps_of(events: list[dict[str, Any]]) -> list[OverlapStep]:
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    marks = sorted(
        _span(e) for e in timed if e["name"].startswith(_STEP) and e["cat"] == "user_annotation"
    )
    kernels = [event for event in timed if event.get("cat") == "kernel"]
    if kernels:
        travelling = [event for event in kernels if "nccl" in event["name"].lower()]
        computing = [event for event in kernels if "nccl" not in event["name"].lower()]
    else:
        travelling = [event for event in timed if event["name"].startswith("gloo:")]
        gloo = {event["tid"] for event in travelling}  # their copies are part of a collective
        computing = _leaves([e for e in timed if e.get("cat") == "cpu_op" and e["tid"] not in gloo])
        # the call that hands a collective over computes nothing
        computing = [event for event in computing if not event["name"].startswith("c10d::")]
    computation, communication = _merged(computing), _merged(travelling)
    return [
        OverlapStep(mark, _common(computation, [mark]), _common(communication, [mark]))
        for mark in marks
    ]


def _leaves(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the operators that call no others: a caller's time may hold waits."""
    found = []
    for tid in {event["tid"] for event in events}:
        # by beginning, callers first: an operator's first callee comes right behind it
        own = sorted((e for e in events if e["tid"] == tid), key=lambda e: (e["ts"], -e["dur"]))
        ends = [event["ts"] + event["dur"] for event in own]
        nexts = [event["ts"] for event in own[1:]] + [float("inf")]
        found += [e for e, end, later in zip(own, ends, nexts, strict=True) if later >= end]
    return found


def _span(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _merged(events: list[dict[str, Any]]) -> Spans:
    spans: Spans = []
    for begin, end in sorted(map(_span, events)):
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((begin, end))
    return spans


def _common(left: Spans, right: Spans) -> Spans:
    """Return the time that lies in both."""
    found: Spans = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            found.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def _total(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
