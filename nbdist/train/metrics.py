"""What a run measured, step by step, and its progress line (ranks)."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from tqdm.std import tqdm

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from matplotlib.figure import Figure

__all__ = ["ProgressLine", "StepRecord", "TrainHistory", "shown_figure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step, equal on all ranks but for times and what follows from them.

    Attributes:
        step: number of steps done, this one included.
        loss: mean over the global batch, before the update.
        learning_rate: of this update.
        grad_norm: of the whole gradient, before clipping.
        seconds: wall-clock time of the step on this rank, without evaluation and saving.
        tokens_per_second: target tokens of the global batch over `seconds`.
        mfu: share of the devices' peak that the model's own FLOPs took (`nbdist.train.mfu`); None
            where the peak is not known.
        validation_loss: mean over the validation split after the update, where it was evaluated.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    seconds: float
    tokens_per_second: float
    mfu: float | None = None
    validation_loss: float | None = None


@dataclass(slots=True)
class TrainHistory:
    """The records of a run since it was started or resumed, oldest first."""

    records: list[StepRecord] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [record.loss for record in self.records]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all steps over their time; 0.0 without steps."""
        seconds = sum(record.seconds for record in self.records)
        tokens = sum(record.tokens_per_second * record.seconds for record in self.records)
        return tokens / seconds if seconds else 0.0

    def forget_after(self, step: int) -> None:
        """Drop the records of later steps: they are run again."""
        self.records[:] = [record for record in self.records if record.step <= step]

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        if not self.records:
            return "TrainHistory(no steps)"
        first, last = self.records[0], self.records[-1]
        seen = [r.validation_loss for r in self.records if r.validation_loss is not None]
        validation = f", validation loss {seen[-1]:.3f}" if seen else ""
        return (
            f"TrainHistory(loss {first.loss:.3f} -> {last.loss:.3f}{validation}, steps "
            f"{first.step}-{last.step}, {self.tokens_per_second:,.0f} tokens/s)"
        )

    def plot(self) -> Figure:
        """Return a figure of the losses over the steps; a notebook shows it.

        Raises:
            ImportError: matplotlib is not installed; the text names the command.
        """
        figure = shown_figure("TrainHistory.plot", figsize=(6, 3.5))
        axes = figure.subplots()
        axes.plot([record.step for record in self.records], self.losses, label="training")
        evaluated = {
            record.step: record.validation_loss
            for record in self.records
            if record.validation_loss is not None
        }
        if evaluated:
            axes.plot(list(evaluated), list(evaluated.values()), "o-", label="validation")
            axes.legend()
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        return figure


def shown_figure(asked: str, *, figsize: tuple[float, float]) -> Figure:
    """Return an empty figure that shows itself in a notebook.

    Args:
        asked: what needs it, for the error.
        figsize: in inches.

    Raises:
        ImportError: matplotlib is not installed; the text names the command.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f'`{asked}` needs matplotlib, which is not installed; run: pip install "nbdist[plot]"'
        ) from error

    class ShownFigure(Figure):
        """A figure that shows itself without pyplot, which keeps a global list of figures."""

        def _repr_png_(self) -> bytes:
            from io import BytesIO

            image = BytesIO()
            self.savefig(image, format="png")
            return image.getvalue()

    return ShownFigure(figsize=figsize, layout="constrained")


class _Bar(tqdm):  # type: ignore[misc] # tqdm has no types
    monitor_interval = 0  # no helper thread on a rank
    _lock = threading.RLock()  # tqdm's own would hold a semaphore that a rank's exit leaks


class ProgressLine:
    """The progress of a run as one line of text on stderr; silent unless `shown`."""

    def __init__(self, *, done: int, total: int, shown: bool) -> None:
        self._bar: Any = _Bar(
            total=total,
            initial=done,
            file=sys.stderr,
            disable=not shown,
            mininterval=0.5,
            unit="step",
            desc="training",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def show(self, record: StepRecord, more: Callable[[], str] = str) -> None:
        """Show a step; redrawn at most twice a second.

        Args:
            record: of the step.
            more: returns what else stands in the line; called only if it is shown.
        """
        if self._bar.disable:
            return
        words = [f"loss {record.loss:.3f}"]
        if record.validation_loss is not None:
            words.append(f"validation {record.validation_loss:.3f}")
        words.append(f"{record.tokens_per_second:,.0f} tokens/s")
        if record.mfu is not None:
            words.append(f"MFU {record.mfu:.1%}")
        words.append(f"lr {record.learning_rate:.1e}")
        if text := more():
            words.append(text)
        self._bar.set_postfix_str(", ".join(words), refresh=False)
        self._bar.update(record.step - self._bar.n)  # backwards after a failure
