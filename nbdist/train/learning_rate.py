"""How the learning rate follows the global batch (ranks)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nbdist.train.config import TrainConfig

__all__ = ["ScaledRate", "batch_line", "scale_learning_rate"]


class ScaledRate(float):
    """A learning rate that remembers what it comes from, as text in `origin`."""

    origin = ""


def batch_line(config: TrainConfig, num_data_ranks: int) -> str:
    """Return what a step's batch consists of, and the learning rate, on one line.

    Args:
        config: how to train.
        num_data_ranks: ranks that hold different rows.
    """
    parts = num_data_ranks * config.accumulation_steps
    fewest, left = divmod(config.global_batch_size, parts)
    rows = f"{fewest} to {fewest + 1}" if left else str(fewest)
    micro = config.accumulation_steps
    batches = f" x {micro} micro-batches" if micro > 1 else ""
    origin = getattr(config.learning_rate, "origin", "")
    return (
        f"global batch {config.global_batch_size} = {num_data_ranks} ranks x {rows} rows{batches}, "
        f"learning rate {config.learning_rate:g}" + (f" ({origin})" if origin else "")
    )


def scale_learning_rate(
    base: float, *, base_batch: int, batch: int, rule: Literal["linear", "sqrt"] = "sqrt"
) -> ScaledRate:
    """Return the learning rate for another global batch; warm up to it.

    A number like any other; `Trainer` tells where it comes from.

    "linear" multiplies it as the batch (Goyal et al., arXiv 1706.02677: SGD); "sqrt" by the root of
    that (Malladi et al., arXiv 2205.10287: Adam).

    Args:
        base: the learning rate that suits `base_batch`.
        base_batch: rows a step, over all ranks.
        batch: rows a step, over all ranks, to train with.
        rule: how the rate follows.

    Raises:
        ValueError: a number is not above 0, or the rule is unknown.
    """
    for name, value in (("base", base), ("base_batch", base_batch), ("batch", batch)):
        if not value > 0:
            raise ValueError(f"{name}={value} is not above 0; set {name} > 0")
    if rule not in ("linear", "sqrt"):
        raise ValueError(f'rule={rule!r} is unknown; set "linear" or "sqrt"')
    times = batch / base_batch
    rate = ScaledRate(base * (times if rule == "linear" else math.sqrt(times)))
    rate.origin = f"{rule} rule from {base:g} at batch {base_batch}"
    return rate
