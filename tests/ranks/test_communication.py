"""Compression, buckets and prefetch against plain DDP and FSDP."""

import warnings

import pytest
import torch
import torch.distributed as dist

from nbdist.testing import run_ranks
from nbdist.train import (
    CommunicationConfig,
    DecoderConfig,
    DecoderLM,
    MeshConfig,
    TextData,
    TrainConfig,
    Trainer,
    WireCounter,
    build_mesh,
    parallelize,
    shakespeare,
)
from nbdist.train.communication import compressed_mean, onebit

STEPS = 12


def _train(strategy, **options):
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=280, num_layers=2, hidden_size=32, context_length=12)
    mesh = build_mesh()
    communication = CommunicationConfig(warmup_steps=4, **options) if options else None
    model = parallelize(DecoderLM(config), mesh, strategy=strategy, communication=communication)
    data = TextData(shakespeare()[:8000], vocab_size=280, context_length=12)
    train = TrainConfig(num_steps=STEPS, global_batch_size=6, warmup_steps=2)
    trainer = Trainer(model, data, train, mesh=mesh)
    with WireCounter() as wire:
        losses = trainer.fit().losses
    weights = [getattr(p, "_local_tensor", p).detach() for p in trainer.model.parameters()]
    return losses, wire.total, torch.cat([w.flatten() for w in weights]), trainer


def _compressed(rank):
    found = {}
    onebit._REFRESH_EVERY = 4  # in this process: steps 8 and 12 are plain
    plain, _, expected, _ = _train("ddp")
    for name, options in {
        "buckets": {"bucket_megabytes": 0.02},
        "fp16": {"compression": "fp16"},
        "powersgd": {"compression": "powersgd", "powersgd_rank": 2},
        "onebit": {"compression": "onebit"},
    }.items():
        losses, sent, weights, trainer = _train("ddp", **options)
        others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(others, weights)
        equal = all(torch.equal(weights, other) for other in others)
        found[name] = (losses, sent, equal, (weights - expected).abs().max().item())
    assert trainer.optimizer.residuals()["worker"].abs().sum() > 0
    return plain, found, sum(p.numel() for p in trainer.model.parameters())


@pytest.mark.parametrize("world_size", [2, 3])
def test_compression_follows_plain_ddp_with_equal_replicas_and_fewer_bytes(world_size):
    for plain, found, num_weights in run_ranks(_compressed, world_size):
        dense = 2 * (world_size - 1) / world_size * 4 * num_weights * STEPS
        assert all(equal for _, _, equal, _ in found.values())
        # only the order of additions differs
        assert found["buckets"][0] == pytest.approx(plain, abs=1e-5)
        # 11 bits of each gradient, 12 steps of losses near 5
        assert found["fp16"][0] == pytest.approx(plain, abs=5e-3)
        assert found["onebit"][0][:5] == pytest.approx(plain[:5], abs=1e-5)  # warm-up is AdamW
        assert found["onebit"][0][-1] < plain[0] - 0.2
        assert found["powersgd"][0][-1] < plain[0] - 0.2
        # the shared loss and the chunks that fill up the last part are the rest
        assert found["buckets"][1] == pytest.approx(dense, rel=0.01)
        assert found["fp16"][1] == pytest.approx(dense / 2, rel=0.01)
        assert found["onebit"][1] < (6 / STEPS + 6 / STEPS / 25) * dense
        assert found["powersgd"][1] < 0.6 * dense


def _feedback(rank):
    size, n = dist.get_world_size(), 512 * 3 * dist.get_world_size()
    values = torch.randn(n, generator=torch.Generator().manual_seed(rank))
    mean = values.clone()
    dist.all_reduce(mean)
    mean /= size
    worker, server = torch.zeros(n), torch.zeros(n // size)
    outputs = [compressed_mean(values, worker, server, None) for _ in range(32)]
    kept = worker.clone()
    dist.all_reduce(kept)
    parts = [torch.empty_like(server) for _ in range(size)]
    dist.all_gather(parts, server)
    total = torch.stack(outputs).sum(0) + kept / size + torch.cat(parts)
    first, average = outputs[0] - mean, torch.stack(outputs).mean(0) - mean
    return (total / 32 - mean).abs().max().item(), (average.norm() / first.norm()).item()


def test_error_feedback_loses_nothing_of_what_was_to_be_sent():
    for lost, left in run_ranks(_feedback, 3):
        assert lost < 1e-5  # what came out and the errors kept add up to the input: rounding
        assert left < 0.5  # the average of 32 calls is nearer to the mean than one call


def _prefetched(rank):
    plain, _, weights, _ = _train("zero3")
    ahead, sent, others, _ = _train("zero3", prefetch=2)
    return plain == ahead, torch.equal(weights, others), sent, _warned()


def _warned():
    texts = []
    config = DecoderConfig(
        vocab_size=280, num_layers=2, hidden_size=32, context_length=12, tie_embeddings=False
    )
    for mesh in (MeshConfig(), MeshConfig(dp_shard=1, tp=2), MeshConfig(dp_shard=1, pp=2)):
        model = DecoderLM(config)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            parallelize(model, build_mesh(mesh), communication=CommunicationConfig(prefetch=1))
        texts.append([str(w.message) for w in caught if w.filename == __file__])
    return texts


def test_prefetch_changes_no_number_and_is_warned_of_where_it_has_no_effect():
    for losses_equal, weights_equal, sent, texts in run_ranks(_prefetched, 2):
        assert texts[0] == []
        assert ["no effect" in text for [text] in texts[1:]] == [True, True]
        assert "one data-parallel rank" in texts[1][0]
        assert "pp=2" in texts[2][0]
        assert losses_equal
        assert weights_equal
        assert sent > 0
