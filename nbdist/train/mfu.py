"""Model FLOPs utilization: what a run reaches of what its devices could do (ranks)."""

from __future__ import annotations

import re
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from nbdist.train.models import MixtureOfExperts
from nbdist.train.parallelize import applied_to, bare

if TYPE_CHECKING:
    from torch import nn

__all__ = ["GPU_PEAKS", "flops_per_token", "peak_flops"]

# Dense FLOP/s of 16 bit on tensor cores, and of 32 bit without them, by words that all stand in the
# name of the device; of the entries that match, the first counts. Where NVIDIA gives a rate with
# sparsity, half of it. From NVIDIA's data sheets, as others quote them (H100, H200, A100, A40, A10,
# L40, L40S, L4, V100, T4; of Blackwell its table of HGX B200 and GB200 NVL72; of the A10G what AWS
# gives), compared with the tables of Lightning's `throughput` (but for the A10G) and of nanochat.
GPU_PEAKS: dict[str, tuple[float, float]] = {
    "GB200": (2500e12, 80e12),
    "B200": (2250e12, 75e12),
    "GH200": (989e12, 67e12),
    "H200 NVL": (835e12, 60e12),
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100 HBM2e": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "A40": (149.7e12, 37.4e12),
    "A10G": (70e12, 35e12),
    "A10": (125e12, 31.2e12),
    "L40S": (362e12, 91.6e12),
    "L40": (181e12, 90.5e12),
    "L4": (121e12, 30.3e12),
    "V100S": (130e12, 16.4e12),
    "V100 PCIE": (112e12, 14e12),
    "V100": (125e12, 15.7e12),
    "T4": (65e12, 8.1e12),
}
_TIMED_WIDTH = 512
_TIMED_RUNS = 5


def flops_per_token(model: nn.Module, num_tokens: int) -> float | None:
    """Return the FLOPs that forward and backward of a token need: 6N + 12LHQT.

    After PaLM (arXiv 2204.02311, appendix B): N weights, L layers, H heads of size Q, T tokens a
    row. Nothing is counted for computing activations again. Of experts the share that a token
    goes through counts. The second term is left out where `model.config` does not name L, H and Q
    as `DecoderConfig` or a Hugging Face configuration does.

    Args:
        model: whole, or from `parallelize`.
        num_tokens: T.

    Returns:
        None for a pipeline whose whole model could not be copied.
    """
    applied = applied_to(model)
    skeleton = applied.again.skeleton.module if applied and applied.again else None
    if skeleton is None and applied is not None and applied.pipeline is not None:
        return None
    whole = skeleton if skeleton is not None else bare(model)
    weights = float(sum(parameter.numel() for parameter in whole.parameters()))
    for module in whole.modules():
        if isinstance(module, MixtureOfExperts):
            unused = 1 - module.experts_per_token / module.num_experts
            weights -= unused * sum(p.numel() for p in module.experts.parameters())
    return 6 * weights + 12 * _attention_width(getattr(whole, "config", None)) * num_tokens


def _attention_width(config: Any) -> int:
    """Return L * H * Q."""
    if all(hasattr(config, name) for name in ("num_layers", "num_heads", "head_size")):
        return int(config.num_layers * config.num_heads * config.head_size)
    if all(hasattr(config, name) for name in ("num_hidden_layers", "hidden_size")):
        heads = getattr(config, "num_attention_heads", 1)
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return int(config.num_hidden_layers * heads * size)
    return 0


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of this rank's device in matrix products of a dtype. Not collective.

    Of a GPU from `GPU_PEAKS`; None for one that is not there, for a part of one (MIG), and for a
    dtype that it has no such units for. TF32 counts as half of 16 bit. Of a CPU it is measured,
    with this process's threads: ranks that share cores measure what is left.
    """
    if device.type == "cpu":
        return _measured(dtype, torch.get_num_threads())
    if device.type != "cuda":
        return None
    # whole words: an RTX A4000 is no A40, an L40 no L4
    words = set(re.split(r"\W+", torch.cuda.get_device_name(device)))
    found = next((peaks for key, peaks in GPU_PEAKS.items() if words >= set(key.split())), None)
    if found is None or "MIG" in words:
        return None
    is_ampere = torch.cuda.get_device_capability(device) >= (8, 0)  # or later: bfloat16, TF32
    if dtype.itemsize == 2:
        return found[0] if is_ampere or dtype == torch.float16 else None
    if dtype == torch.float32 and is_ampere and torch.backends.cuda.matmul.allow_tf32:
        return found[0] / 2
    return found[1] if dtype == torch.float32 else None


@cache
def _measured(dtype: torch.dtype, num_threads: int) -> float:
    """Return the best of a few products of square matrices; kept for each number of threads."""
    del num_threads
    left = torch.ones(_TIMED_WIDTH, _TIMED_WIDTH, dtype=dtype)
    out = torch.empty_like(left)
    best = float("inf")
    for _ in range(_TIMED_RUNS):
        started = time.perf_counter()
        torch.mm(left, left, out=out)
        best = min(best, time.perf_counter() - started)
    return 2 * _TIMED_WIDTH**3 / best
