"""The memory table, and memory that is given back."""

from __future__ import annotations

import gc

import psutil
import torch

from nbdist.messages import EngineStats
from nbdist.serve import Router, serve
from nbdist.serve.memory import memory_line, memory_table
from nbdist.train.models.decoder import DecoderConfig, DecoderLM


def test_memory_table_shows_both_layouts_side_by_side():
    one = EngineStats(
        num_running=3,
        used_bytes=72 * 1024,
        paged_bytes=96 * 1024,
        contiguous_bytes=288 * 1024,
        capacity_bytes=5 * 2**30,
    )

    head, first, second = memory_table({1: one, 0: EngineStats()}).splitlines()

    assert head.split()[:2] == ["rank", "rows"]
    assert " ".join(first.split()) == "0 0 0 B 0 B 0 B of 0 B 0% 0 B 0%"
    assert " ".join(second.split()) == "1 3 72 KiB 0 B 96 KiB of 5.0 GiB 25% 288 KiB 75%"


def test_memory_line_adds_the_ranks_and_says_nothing_without_a_cache():
    one = EngineStats(
        used_bytes=72 * 1024,
        shared_bytes=24 * 1024,
        paged_bytes=64 * 1024,
        contiguous_bytes=288 * 1024,
        capacity_bytes=2**20,
    )

    assert memory_line({0: one, 1: one, 2: EngineStats()}) == (
        "cache: 96 KiB in use; paged 128 KiB of 2 MiB, 25% wasted; contiguous 576 KiB, 75% wasted"
    )
    assert memory_line({0: EngineStats()}) == ""


def test_serving_and_stopping_again_and_again_keeps_memory_flat(tokenizer, one_rank):
    config = DecoderConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=512, num_heads=8, num_layers=4
    )
    model = DecoderLM(config).eval()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    seen = []
    for _ in range(3):
        replica = serve(model, tokenizer, port=one_rank.ports[0])
        router = Router(one_rank)
        assert router.submit("fox", max_new_tokens=4).wait(30)
        router.close()
        replica.stop()
        gc.collect()
        seen.append(psutil.Process().memory_info().rss)

    # the first load may leave caches of libraries; later ones must not add their weights
    assert max(seen[1:]) - seen[0] < weights
    assert torch.is_inference_mode_enabled() is False
