"""Cells that are run again: what they made before is in the way, and the message says so."""

import pytest

from nbdist.errors import CollectiveSubsetError, RemoteCellError

SETUP = """
import copy, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Linear(50, 50) for _ in range(4)])
x = torch.randn(8, 50, generator=torch.Generator().manual_seed(rank))
"""


@pytest.fixture(scope="module")
def net(world):
    world.run(SETUP)
    return world


def test_ddp_is_seen_by_the_check_and_averages_as_without_it(net):
    text = net.run(
        "alone, ddp = copy.deepcopy(net), DDP(copy.deepcopy(net), bucket_cap_mb=0.01)\n"
        "for model in (alone, ddp): model(x).square().mean().backward()\n"
        "means = [p.grad / world_size for p in alone.parameters()]\n"
        "for mean in means: dist.all_reduce(mean)\n"
        "print(all(torch.equal(p.grad, mean) for p, mean in zip(ddp.parameters(), means)))"
    ).text
    assert text == {0: "True\n", 1: "True\n"}
    net.run("ddp(x).sum().backward()")  # here DDP sorts its buckets anew, which is not seen
    with pytest.raises(CollectiveSubsetError, match="rank 0 waits in all_reduce"):
        net.run("ddp(x).sum().backward()", ranks=[0])


def test_hook_of_the_user_is_left_in_place(net):
    source = (
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
        "own = DDP(copy.deepcopy(net))\n"
        "own.register_comm_hook(None, default_hooks.fp16_compress_hook)\n"
        "own(x).sum().backward()\n"
        "print(len(own._comm_hooks))"
    )
    assert net.run(source).text[0] == "1\n"


def test_ddp_around_ddp_is_warned_of(net):
    assert "is in a DDP already" in net.run("twice = DDP(DDP(copy.deepcopy(net)))").text[1]


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("dist.init_process_group('gloo')", "leave init_process_group out"),
        ("again = fully_shard(fully_shard(copy.deepcopy(net)))", "nbdist.train.parallelize"),
    ],
)
def test_what_was_made_already_is_an_error_with_advice(net, source, advice):
    with pytest.raises(RemoteCellError) as caught:
        net.run(source)
    assert advice in caught.value.hint
    assert advice in str(caught.value)


def test_model_of_a_group_that_was_freed_says_to_build_it_again(net):
    net.run("old, sharded = DDP(copy.deepcopy(net)), fully_shard(copy.deepcopy(net))")
    net.run("for model in (old, sharded): model(x).sum().backward()")
    with pytest.raises(RemoteCellError, match="boom"):
        net.run("if rank: raise ValueError('boom')\ndist.barrier()")
    for name in ("old", "sharded"):
        with pytest.raises(RemoteCellError, match="builds the model again"):
            net.run(f"{name}(x).sum().backward()")
    assert net.run("print(DDP(net)(x).shape)").text[0] == "torch.Size([8, 50])\n"
