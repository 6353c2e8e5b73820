"""How a run is trained: the settings and the default loss (ranks)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.nn import functional

from nbdist.train.precision import AUTOCAST

if TYPE_CHECKING:
    from nbdist.train.metrics import StepRecord
    from nbdist.train.saving import CheckpointConfig

__all__ = ["LossFn", "TrainConfig", "next_token_loss"]

LossFn = Callable[[Tensor, Tensor], Tensor]
"""(model output, targets) of a rank's rows -> mean loss over them, a scalar tensor."""


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats.

    Args:
        logits: (..., V); a dtype below 32 bits is widened first.
        targets: (...), long.
    """
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    return functional.cross_entropy(wide.flatten(0, -2), targets.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How a run is trained; the defaults suit `DecoderConfig.tiny`.

    Attributes:
        num_steps: optimizer steps of the whole run, resumed parts included.
        global_batch_size: rows a step, over all ranks.
        accumulation_steps: micro-batches that a rank's rows are cut into; the ranks exchange
            gradients once a step.
        learning_rate: at its peak, after the warm-up.
        warmup_steps: steps over which the learning rate rises from near 0.
        final_learning_rate_fraction: what a half cosine leaves of the peak at the last step.
        weight_decay: AdamW's (arXiv 1711.05101), on weights with two or more dimensions.
        betas: AdamW's.
        clip_norm: most norm of the whole gradient; infinity leaves it as it is.
        autocast_dtype: "bfloat16" or "float16" for matrix products; the weights keep their dtype.
            float16 gradients are scaled, and steps with an infinite one are left out.
        detect_anomaly: look for NaN and infinity in every layer, and name the layer and rank.
        deterministic: only operators that give the same result every time.
        seed: of the random generators; each rank draws its own numbers.
        eval_every: steps between passes over the validation split; None never evaluates.
        checkpoint: where and how often to save; None never saves.
        on_failure: when a rank dies in `fit`: "heal" puts a new process in its place and goes on,
            or goes on without where none can be started; "shrink" goes on without at once; "stop"
            ends the cell.
        min_ranks: fewest ranks that a run goes on with after that.
        max_failures: failures within `per_hours` that are survived; the next one ends the cell.
        per_hours: length of that time.
        mirror_every: unless "stop", steps between copies of a rank's state in its neighbour's
            memory: at most so many are done again.
        check_every: steps between comparisons of the state that data-parallel replicas have equal,
            before the step is saved: a flipped bit ends `fit` on all ranks. None never compares.
        straggler_steps: steps after which the ranks' times are compared, again and again; a rank
            that the others wait for is named with its phase.
        straggler_ratio: of its own work in a step to that of the others.
        loss_fn: mean loss of a rank's rows.
        on_step: called on every rank with each step's record; what it raises ends `fit` after that
            step, so it must raise on all ranks or on none.
    """

    num_steps: int
    global_batch_size: int = 16
    accumulation_steps: int = 1
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    final_learning_rate_fraction: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    autocast_dtype: str | None = None
    detect_anomaly: bool = False
    deterministic: bool = False
    seed: int = 0
    eval_every: int | None = None
    checkpoint: CheckpointConfig | None = None
    on_failure: Literal["heal", "shrink", "stop"] = "stop"
    min_ranks: int = 1
    max_failures: int = 3
    per_hours: float = 1.0
    mirror_every: int = 1
    check_every: int | None = None
    straggler_steps: int = 20
    straggler_ratio: float = 1.3
    loss_fn: LossFn = next_token_loss
    on_step: Callable[[StepRecord], None] | None = None

    def __post_init__(self) -> None:
        positive = ("num_steps", "global_batch_size", "accumulation_steps", "mirror_every")
        numbers = ("straggler_steps", "learning_rate", "clip_norm", "per_hours", "min_ranks")
        for name in (*positive, *numbers):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} is not above 0; set {name} > 0")
        for name in ("warmup_steps", "weight_decay", "seed", "max_failures"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is below 0; set {name} >= 0")
        if not self.straggler_ratio > 1:
            raise ValueError(
                f"straggler_ratio={self.straggler_ratio} would name ranks that are as fast as the "
                "others; set straggler_ratio > 1, or inf to name none"
            )
        if self.autocast_dtype not in (None, *AUTOCAST):
            raise ValueError(
                f"autocast_dtype={self.autocast_dtype!r} is none of {', '.join(AUTOCAST)}; set one "
                "of them by name, or None"
            )
        if self.on_failure not in ("heal", "shrink", "stop"):
            raise ValueError(
                f"on_failure={self.on_failure!r} is not known; set on_failure='heal', 'shrink' or "
                "'stop'"
            )
        for name, what in (("eval_every", "evaluate"), ("check_every", "compare")):
            every = getattr(self, name)
            if every is not None and every < 1:
                raise ValueError(f"{name}={every} is below 1; set {name}=None never to {what}")

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of the update that follows `step` finished ones."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        span = max(self.num_steps - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / span, 1.0)
        low = self.final_learning_rate_fraction
        return self.learning_rate * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)

    def describe(self) -> dict[str, Any]:
        """Return the fields as JSON values, for a manifest; functions by name."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("loss_fn", "on_step"):
            plain[name] = getattr(plain[name], "__qualname__", plain[name] and repr(plain[name]))
        if self.checkpoint is not None:
            plain["checkpoint"] = dataclasses.asdict(self.checkpoint) | {
                "directory": str(self.checkpoint.directory)
            }
        return plain
