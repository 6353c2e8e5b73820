"""State of a rank's random generators, as JSON values (ranks)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["restore_rng", "rng_state", "seed_rng"]


def rng_state() -> dict[str, Any]:
    """Return the states of torch's, the GPU's, numpy's (legacy) and Python's generators."""
    version, words, next_gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    on_gpu = torch.cuda.is_available()
    return {
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "cuda": bytes(torch.cuda.get_rng_state().tolist()).hex() if on_gpu else None,
        "numpy": [[int(key) for key in keys], int(place), int(has_gauss), float(cached)],
        "python": [version, list(words), next_gauss],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Set the generators to what `rng_state` returned."""
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))
    keys, place, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), place, has_gauss, cached))
    version, words, next_gauss = state["python"]
    random.setstate((version, tuple(words), next_gauss))


def seed_rng(seed: int, step: int, rank: int) -> None:
    """Seed all generators from (seed, step, rank): ranks draw different numbers."""
    words = np.random.SeedSequence((seed, step, rank)).generate_state(3)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))


def _bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
