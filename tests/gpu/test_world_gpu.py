"""Ranks on GPUs: binding, both backends, a blocked NCCL collective freed, training."""

import time

import pytest

from nbdist import World
from nbdist.cluster.config import count_gpus
from nbdist.errors import RemoteCellError


@pytest.fixture(scope="module")
def world():
    with World.start() as started:
        yield started


def test_start_without_a_number_gives_one_rank_a_gpu(world):
    assert world.num_ranks == count_gpus()
    assert [info.device for info in world.infos] == [
        f"cuda:{info.local_rank}" for info in world.infos
    ]
    assert all(info.memory_bytes > 2**30 for info in world.infos)


def test_more_ranks_than_gpus_is_refused_by_name():
    with pytest.raises(Exception, match="needs a GPU of its own"):
        World.start(count_gpus() + 1)


def test_collectives_run_on_host_and_device_tensors(world):
    source = (
        "import torch, torch.distributed as dist\n"
        "for where in ('cpu', device):\n"
        "    x = torch.ones(1, device=where); dist.all_reduce(x); print(int(x))"
    )
    expected = f"{world.num_ranks}\n" * 2
    assert set(world.run(source).text.values()) == {expected}


def test_blocked_nccl_collective_is_freed_when_a_rank_raises(world):
    if world.num_ranks < 2:
        pytest.skip("needs two GPUs: with one no rank can wait for another")
    started = time.monotonic()
    with pytest.raises(RemoteCellError, match="boom"):
        world.run(
            "if rank == 1: raise ValueError('boom')\n"
            "x = torch.ones(1, device=device); dist.all_reduce(x); torch.cuda.synchronize()"
        )
    assert time.monotonic() - started < 15
    assert world.run("print('alive')").text[0] == "alive\n"


def test_training_and_serving_run_on_the_gpu(world):
    source = (
        "from nbdist.train import *\nfrom nbdist.serve import serve\n"
        "text = shakespeare(); data = TextData(text, context_length=64)\n"
        "model = DecoderLM(DecoderConfig.tiny(data.vocab_size)).to(device)\n"
        "history = Trainer(model, data, TrainConfig(num_steps=20)).fit()\n"
        "serve(model, data.tokenizer)\n"
        "print(next(model.parameters()).device.type, history.losses[-1] < history.losses[0])"
    )
    from nbdist.serve import generate

    assert world.run(source).text[0].endswith("cuda True\n")
    answer = generate(world, "ROMEO:", max_new_tokens=8, temperature=0)[0]
    assert answer.finish_reason in ("length", "stop")
