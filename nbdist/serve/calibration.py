"""How sure a model may say it is: temperature scaling (rank; needs torch).

Guo et al., "On Calibration of Modern Neural Networks", arXiv 1706.04599. A temperature changes no
answer, only the confidence in it. It belongs to the weights it was fitted to: weights in 8 or 4
bits need their own.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["calibration_error", "confidence", "fit_temperature"]

_MAX_STEPS = 100


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the temperature that makes held-out labels likeliest.

    Args:
        logits: (N, C), of items that the model was not trained on.
        labels: (N,), the right classes.

    Raises:
        ValueError: there is no item, or logits and labels do not fit or are not finite.
    """
    _check(logits, labels)
    logits = logits.detach().double()
    inverse_log = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([inverse_log], max_iter=_MAX_STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = functional.cross_entropy(logits * inverse_log.exp(), labels)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    # of items that are all answered right the likeliest temperature is 0, which no division takes
    return float((-inverse_log.detach()).exp().clamp(1e-2, 1e2))


def confidence(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the probability of the likeliest class at a temperature; logits (..., C) -> (...)."""
    return (logits.float() / temperature).softmax(dim=-1).amax(dim=-1)


def calibration_error(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, *, num_bins: int = 15
) -> float:
    """Return the mean gap between confidence and share of right answers (ECE, Guo et al., 2).

    Args:
        logits: (N, C).
        labels: (N,).
        temperature: of the confidence.
        num_bins: equal steps of confidence that are compared.
    """
    _check(logits, labels)
    sure = confidence(logits, temperature)
    right = (logits.argmax(dim=-1) == labels).float()
    bins = (sure * num_bins).long().clamp(max=num_bins - 1)
    gaps = torch.zeros(num_bins).index_add(0, bins, sure - right)
    return float(gaps.abs().sum() / len(labels))


def _check(logits: torch.Tensor, labels: torch.Tensor) -> None:
    if logits.dim() != 2 or not len(logits) or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)} do "
            "not fit; give (N, C) and (N,) with N >= 1"
        )
    if not logits.isfinite().all():
        raise ValueError("some logits are not finite; calibrate a model that did not diverge")
