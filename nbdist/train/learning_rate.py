"""How the learning rate follows the global batch (ranks)."""

from __future__ import annotations

import math
from typing import Literal

__all__ = ["scale_learning_rate"]


def scale_learning_rate(
    base: float, *, base_batch: int, batch: int, rule: Literal["linear", "sqrt"] = "sqrt"
) -> float:
    """Return the learning rate for another global batch; warm up to it.

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
    return base * (times if rule == "linear" else math.sqrt(times))
