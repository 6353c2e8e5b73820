"""Every way to spread a model equals one plain process: loss, norm and gradients of 10 steps."""

import pytest

from nbdist.testing import run_ranks
from nbdist.train import (
    DecoderConfig,
    DecoderLM,
    MeshConfig,
    PipelineConfig,
    TextData,
    TrainConfig,
    shakespeare,
)
from nbdist.train.parity import compare, trace_one_process

NUM_STEPS = 10
# float64: sums in another order differ by 1e-16 a term; Adam's square root raises it over 10 steps
TOLERANCE = 1e-11


def _data():
    return TextData(shakespeare()[:12_000], vocab_size=264, context_length=12, seed=2)


def _model(*, heads=4, kv_heads=2, tied=True, **experts):
    config = DecoderConfig(
        vocab_size=264,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        hidden_size=24,
        ffn_multiple=2,  # 48, which 2 and 3 ranks can share
        context_length=12,
        tie_embeddings=tied,
        **experts,
    )
    return DecoderLM(config, seed=1).double()


def _config(**change):
    # a clip that acts on most steps: the norm of the whole gradient is part of what is compared
    base = {"num_steps": NUM_STEPS, "global_batch_size": 8, "warmup_steps": 2, "clip_norm": 0.5}
    return TrainConfig(**base | change)


def _compare(rank, cases):
    data = _data()
    found = {}
    for name, (mesh, model, train, options) in cases.items():
        expected = trace_one_process(_model(**model), data, _config())
        found[name] = compare(expected, _model(**model), data, _config(**train), mesh, **options)
    return found


def _pipe(mesh, schedule, model=None, **options):
    pipeline = PipelineConfig(schedule=schedule, num_micro_batches=4)
    return mesh, {"tied": False, **(model or {})}, {}, {"pipeline": pipeline, **options}


MOE = {"num_experts": 4, "capacity_factor": 1.0}
AGAIN = {"checkpoint_activations": True}
CUT = {"sequence_parallel": True, "loss_parallel": True}
UNTIED = {"tied": False}
TWO = {
    "ddp": (MeshConfig(), {}, {}, {"strategy": "ddp"}),
    "ddp, 3 micro-batches": (MeshConfig(), {}, {"accumulation_steps": 3}, {"strategy": "ddp"}),
    "zero1, 2 micro-batches": (MeshConfig(), {}, {"accumulation_steps": 2}, {"strategy": "zero1"}),
    "zero2, 2 micro-batches": (MeshConfig(), {}, {"accumulation_steps": 2}, {"strategy": "zero2"}),
    "zero3, 3 micro-batches": (MeshConfig(), {}, {"accumulation_steps": 3}, {}),
    "zero3, recomputed": (MeshConfig(), {}, {}, AGAIN),
    "tp": (MeshConfig(tp=2), {}, {}, {}),
    "tp, untied": (MeshConfig(tp=2), UNTIED, {}, {}),
    "tp, loss parallel": (MeshConfig(tp=2), {}, {}, {"loss_parallel": True}),
    "tp, sequence parallel": (MeshConfig(tp=2), {}, {}, {"sequence_parallel": True}),
    "tp, both": (MeshConfig(tp=2), {}, {}, CUT),
    "tp, both, untied": (MeshConfig(tp=2), UNTIED, {}, CUT),
    "experts, dp_shard": (MeshConfig(), MOE, {}, {}),
    "ep": (MeshConfig(ep=2), MOE, {}, {}),
    "ep, recomputed": (MeshConfig(ep=2), MOE, {}, AGAIN),
    "ep, top 1, 3 micro-batches": (
        MeshConfig(ep=2),
        MOE | {"experts_per_token": 1},
        {"accumulation_steps": 3},
        {},
    ),
    "pp, gpipe": _pipe(MeshConfig(pp=2), "gpipe"),
    "pp, 1f1b": _pipe(MeshConfig(pp=2), "1f1b"),
    "pp, interleaved": _pipe(MeshConfig(pp=2), "interleaved"),
    "pp, zero bubble": _pipe(MeshConfig(pp=2), "zero_bubble"),
    "pp, zbv": _pipe(MeshConfig(pp=2), "zbv"),
}
THREE = {
    "zero3, uneven rows": (MeshConfig(), {}, {"accumulation_steps": 2}, {}),
    "ddp, uneven rows": (MeshConfig(), {}, {}, {"strategy": "ddp"}),
    "pp, 1f1b": (
        *_pipe(MeshConfig(pp=3), "1f1b")[:2],
        {"global_batch_size": 8},
        {"pipeline": PipelineConfig()},
    ),
    "ep, uneven rows": (MeshConfig(ep=3), MOE | {"num_experts": 6}, {}, {}),
    "tp, both": (MeshConfig(tp=3), {"heads": 3, "kv_heads": 3}, {}, CUT),
}
FOUR = {
    "dp_shard x tp": (MeshConfig(dp_shard=2, tp=2), {}, {}, {}),
    "dp_shard x tp, both": (
        MeshConfig(dp_shard=2, tp=2),
        {},
        {"accumulation_steps": 2},
        CUT | AGAIN,
    ),
    "dp_shard x tp, both, untied": (MeshConfig(dp_shard=2, tp=2), UNTIED, {}, CUT),
    "dp_replicate x tp": (MeshConfig(dp_replicate=2, tp=2), {}, {}, CUT),
    "pp x dp_shard, 1f1b": _pipe(MeshConfig(pp=2, dp_shard=2), "1f1b"),
    "pp x dp_shard, zero bubble": _pipe(MeshConfig(pp=2, dp_shard=2), "zero_bubble"),
    "pp x tp, interleaved": _pipe(MeshConfig(pp=2, tp=2), "interleaved", loss_parallel=True),
    "ep x dp_shard": (MeshConfig(ep=2, dp_shard=2), MOE, {}, {}),
    "ep x dp_replicate": (MeshConfig(ep=2, dp_replicate=2), MOE, {}, {}),
    "ep x tp": (MeshConfig(ep=2, tp=2), MOE, {}, {"loss_parallel": True}),
    "ep x pp": _pipe(MeshConfig(ep=2, pp=2), "1f1b", MOE | {"balance_weight": 0.0}),
    "dp_replicate x dp_shard": (MeshConfig(dp_replicate=2, dp_shard=2), {}, {}, {}),
}


@pytest.mark.parametrize(
    ("world_size", "cases"), [(2, TWO), (3, THREE), (4, FOUR)], ids=["2", "3", "4"]
)
def test_mesh_equals_one_process(world_size, cases):
    for found in run_ranks(_compare, world_size, cases, timeout_seconds=110):
        assert set(found) == set(cases)
        for name, parity in found.items():
            assert parity.num_steps == NUM_STEPS, name
            largest = max(parity.loss, parity.norm, parity.gradient)
            assert largest < TOLERANCE, (name, parity)
