"""The memory plan against the peak of a whole process."""

import ctypes
import gc
from pathlib import Path

import pytest
import torch

from nbdist.testing import run_ranks
from nbdist.train import (
    DecoderConfig,
    DecoderLM,
    MeshConfig,
    TextData,
    TrainConfig,
    Trainer,
    build_mesh,
    parallelize,
    shakespeare,
)
from nbdist.train.plan import plan_memory

TOKENS = 64
SHARDED, SPLIT = MeshConfig(), MeshConfig(dp_shard=1, tp=2)
DEEP = {"num_layers": 6, "hidden_size": 256, "vocab_size": 1024}
WIDE = {"num_layers": 2, "hidden_size": 192, "vocab_size": 8192}  # logits are most of it
# mesh, options of `parallelize`, size, rows of the global batch
CASES = {
    "ddp": (SHARDED, {"strategy": "ddp"}, DEEP, 8),
    "zero2": (SHARDED, {"strategy": "zero2"}, DEEP, 8),
    "zero3": (SHARDED, {}, DEEP, 8),
    "zero3, few rows": (SHARDED, {}, DEEP, 2),
    "zero3, recomputed": (SHARDED, {"checkpoint_activations": True}, DEEP, 16),
    "zero3, large vocabulary": (SHARDED, {}, WIDE, 16),
    "replicas": (MeshConfig(dp_replicate=2), {}, DEEP, 8),
    "tp": (SPLIT, {}, DEEP, 8),
    "tp, large vocabulary": (SPLIT, {}, WIDE, 8),
}


def _decoder(size):
    heads = {"num_heads": 4, "num_kv_heads": 4, "context_length": TOKENS}
    return DecoderLM(DecoderConfig(**heads, **size))


def _read(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def _train(mesh, options, size, rows):
    """Return the process's peak in three steps: the third is like all that follow."""
    data = TextData(shakespeare()[:8000], vocab_size=280, context_length=TOKENS)
    model = parallelize(_decoder(size), build_mesh(mesh), **options)
    trainer = Trainer(model, data, TrainConfig(num_steps=3, global_batch_size=rows))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    trainer.fit()
    return _read("VmHWM")


def _peaks(rank):
    libc = ctypes.CDLL(None)
    # what is freed goes back to the system: then the process holds what its tensors take
    assert libc.mallopt(-3, 1 << 16) == libc.mallopt(-1, 1 << 16) == 1  # mmap and trim thresholds
    grown = {}
    for name, (mesh, options, size, rows) in CASES.items():
        # once in small: what is imported and cached is not the model's
        _train(mesh, options, {"num_layers": 2, "hidden_size": 16, "vocab_size": 280}, 4)
        gc.collect()
        libc.malloc_trim(0)
        before = _read("VmRSS")
        grown[name] = _train(mesh, options, size, rows) - before
        gc.collect()
    return grown


def test_plan_is_within_15_percent_of_what_a_process_grows_by():
    plans = {}
    for name, (mesh, options, size, rows) in CASES.items():
        with torch.device("meta"):
            model = _decoder(size)
        data_ranks = 1 if mesh is SPLIT else 2
        sample = torch.zeros(rows // data_ranks, TOKENS, dtype=torch.long)
        plans[name] = plan_memory(model, mesh, 2, sample=sample, **options).total_bytes

    for grown in run_ranks(_peaks, 2, timeout_seconds=100):
        ratios = {name: grown[name] / plans[name] for name in CASES}
        assert ratios == pytest.approx(dict.fromkeys(CASES, 1.0), abs=0.15)
