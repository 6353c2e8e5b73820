"""Collectives that do not match end with one clear error; those that match are never touched."""

import os
import time

import pytest

from nbdist import World
from nbdist.errors import CollectiveSubsetError, RemoteCellError
from nbdist.messages import CellNote

SETUP = "import torch, torch.distributed as dist; kept = rank + 7"
# Torch loads the rest of itself at the first use; an import that is stopped leaves half a module.
WARM = """
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import Shard, distribute_tensor
assert funcol.all_reduce(torch.ones(4), "sum", mesh).sum() == 4 * world_size
d = distribute_tensor(torch.arange(12.0), mesh, [Shard(0)])
d.full_tensor()
"""
SUM = "x = torch.ones(4) * (rank + 1); dist.all_reduce(x); print(int(x[0]), kept - rank)"


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    """Worlds of two and of three ranks."""
    with World.start(request.param) as started:
        started.run(SETUP)
        started.run(WARM)
        yield started


@pytest.fixture(autouse=True)
def _next_cell_works(request):
    """After every test the same processes sum correctly and have kept their names."""
    yield
    if "ranks" in request.fixturenames:
        world = request.getfixturevalue("ranks")
        pids = [info.pid for info in world.infos]
        size = world.num_ranks
        assert set(world.run(SUM).text.values()) == {f"{size * (size + 1) // 2} 7\n"}
        assert [info.pid for info in world.status()] == pids


def fails(world, source, within_seconds=5):
    """Run a cell that must end as a mismatch in time; return its text."""
    began = time.monotonic()
    with pytest.raises(RemoteCellError) as caught:
        world.run(source)
    assert time.monotonic() - began < within_seconds
    assert caught.value.name == "CollectiveMismatchError", caught.value
    return caught.value.value


MISMATCHES = {
    "op": (
        "dist.all_reduce(torch.ones(4)) if rank else dist.broadcast(torch.ones(4), 0)",
        ["broadcast(src=0) of float32 [4]", "all_reduce(sum) of float32 [4]"],
    ),
    "order": (
        (
            "t = torch.ones(4)\n"
            "if rank == 0:\n    dist.barrier(); dist.all_reduce(t)\n"
            "else:\n    dist.all_reduce(t); dist.barrier()"
        ),
        ["barrier", "all_reduce(sum) of float32 [4]"],
    ),
    "shape": (
        "dist.all_reduce(torch.ones(8 if rank == 0 else 9))",
        ["float32 [8]", "float32 [9]"],
    ),
    "dtype": (
        "dist.all_reduce(torch.ones(4, dtype=torch.float32 if rank else torch.float64))",
        ["float64 [4]", "float32 [4]"],
    ),
    "reduction": (
        "dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)",
        ["all_reduce(sum)", "all_reduce(max)"],
    ),
    "root": (
        "dist.broadcast(torch.ones(4), src=min(rank, 1))",
        ["broadcast(src=0)", "broadcast(src=1)"],
    ),
    "broadcast size": (
        "dist.broadcast(torch.ones(4 if rank == 0 else 6), 0)",
        ["float32 [4]", "float32 [6]"],
    ),
    "all_gather size": (
        (
            "t = torch.ones(4 if rank == 0 else 5)\n"
            "dist.all_gather([torch.empty_like(t) for _ in range(world_size)], t)"
        ),
        ["all_gather of float32 [4]", "all_gather of float32 [5]"],
    ),
    "reduce_scatter size": (
        (
            "n = 4 if rank == 0 else 5\n"
            "dist.reduce_scatter_single(torch.ones(n), torch.ones(n * world_size))"
        ),
        ["reduce_scatter(sum) of float32 [4]", "reduce_scatter(sum) of float32 [5]"],
    ),
    "asynchronous": (
        "dist.all_reduce(torch.ones(8 if rank == 0 else 9), async_op=True).wait()",
        ["float32 [8]", "float32 [9]"],
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_calls_that_differ_raise_before_sending_and_show_each_rank(ranks, name):
    source, words = MISMATCHES[name]
    text = fails(ranks, source)
    # Of three ranks the last may not have come when the first two are found to differ.
    for word in [*words, "rank 0: #", "Cell In[", "default group"]:
        assert word in text
    assert "rank 1: #" in text or "rank 2: #" in text


@pytest.mark.parametrize("late_rank", [0, 1])
def test_mismatch_is_found_whichever_rank_comes_last(ranks, late_rank):
    text = fails(
        ranks,
        f"import time\nif rank == {late_rank}: time.sleep(0.3)\n"
        "dist.broadcast(torch.ones(4 if rank == 0 else 6), 0)",
    )
    assert "float32 [4]" in text
    assert "float32 [6]" in text


def test_mismatch_names_the_line_of_the_users_function(ranks):
    text = fails(
        ranks,
        "def share(n):\n    t = torch.ones(n)\n    dist.all_reduce(t)\n\nshare(4 + min(rank, 1))",
    )
    assert "rank 0: #" in text
    assert "line 3" in text


def test_mismatch_in_a_dtensor_call_is_found(ranks):
    text = fails(
        ranks,
        "y = funcol.all_reduce(torch.ones(4 + min(rank, 1)), 'sum', mesh) + 1",
        within_seconds=15,  # the freed rank's traceback runs through torch's own, long files
    )
    assert "all_reduce(sum) of float32 [4]" in text


def test_mismatch_in_a_group_of_some_ranks_names_the_group():
    with World.start(3) as world:
        world.run(SETUP + "\npair = dist.new_group([0, 2])")
        text = fails(world, "if rank != 1: dist.all_reduce(torch.ones(3 + rank), group=pair)")
        assert "the group of ranks 0, 2" in text
        assert "rank 2: #1 all_reduce(sum) of float32 [5]" in text


# --- ranks that never come ------------------------------------------------------------------


def stuck(world, source, **options):
    began = time.monotonic()
    with pytest.raises(CollectiveSubsetError) as caught:
        world.run(source, **options)
    assert time.monotonic() - began < 6
    return caught.value


def test_collective_on_a_subset_of_ranks_ends_and_names_who_never_called(ranks):
    error = stuck(ranks, "t = torch.ones(4)\ndist.all_reduce(t)", ranks=[0])
    assert error.ranks == tuple(range(1, ranks.num_ranks))
    assert "rank 0 waits in all_reduce(sum) of float32 [4]" in str(error)
    assert "line 2" in str(error)
    assert "runs no cell and never called it" in str(error)


def test_collective_in_a_branch_that_others_skip_ends_and_names_them(ranks):
    error = stuck(ranks, "if rank == 0:\n    dist.barrier()")
    assert error.ranks == tuple(range(1, ranks.num_ranks))
    assert "has ended its cell without calling it" in str(error)


def test_full_tensor_on_one_rank_ends_and_names_the_others(ranks):
    ranks.run("d = distribute_tensor(torch.arange(12.0), mesh, [Shard(0)])")
    error = stuck(ranks, "d.full_tensor().sum().item()", ranks=[0])
    assert "all_gather" in str(error)


def test_asynchronous_call_that_is_waited_for_on_one_rank_ends(ranks):
    error = stuck(ranks, "dist.all_reduce(torch.ones(4), async_op=True).wait()", ranks=[1])
    assert 0 in error.ranks


def test_call_that_the_other_rank_made_in_an_earlier_cell_is_no_error(ranks):
    ranks.run("work = dist.all_reduce(t := torch.ones(2), async_op=True)", ranks=[0])
    others = list(range(1, ranks.num_ranks))
    ranks.run("import time; time.sleep(4); dist.all_reduce(t := torch.ones(2))", ranks=others)
    texts = ranks.run("'work' in globals() and work.wait(); print(int(t[0]))").text
    assert set(texts.values()) == {f"{ranks.num_ranks}\n"}


# --- programs that are right -----------------------------------------------------------------

RIGHT = {
    "objects": """
        found = [None] * world_size
        dist.all_gather_object(found, {"rank": rank, "pad": "x" * (50 * rank)})
        assert [f["rank"] for f in found] == list(range(world_size))
        box = ["a" * 99, {"b": 1}] if rank == 1 else [None, None]
        dist.broadcast_object_list(box, src=1)
        assert box[1] == {"b": 1}
        gathered = [None] * world_size if rank == 0 else None
        dist.gather_object(rank, gathered, dst=0)
        mine = [None]
        dist.scatter_object_list(mine, list(range(world_size)) if rank == 0 else None, src=0)
        assert mine == [rank]""",
    "uneven all_to_all": """
        counts = [(rank + 1) * (other + 1) for other in range(world_size)]
        theirs = [(other + 1) * (rank + 1) for other in range(world_size)]
        got = torch.empty(sum(theirs))
        dist.all_to_all_single(got, torch.full((sum(counts),), float(rank)), theirs, counts)
        assert got[-1] == world_size - 1
        parts = list(torch.ones(world_size * 2).split(2))
        dist.all_to_all([torch.empty(2) for _ in theirs], parts)""",
    "messages": """
        t = torch.ones(3)
        if rank == 0:
            for other in range(1, world_size):
                dist.send(t * other, other)
        else:
            dist.recv(t, 0)
            assert t[0] == rank
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        got = torch.empty(2)
        ops = [dist.P2POp(dist.isend, torch.ones(2) * rank, right),
               dist.P2POp(dist.irecv, got, left)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert got[0] == left
        if rank == 0:
            dist.isend(t, 1).wait()
        if rank == 1:
            dist.irecv(t, 0).wait()
        dist.barrier()""",
    "groups": """
        alone = [dist.new_group([r]) for r in range(world_size)][rank]
        dist.all_reduce(torch.ones(rank + 1), group=alone)
        first = dist.new_group([0, 1])
        second = dist.new_group([0, 1])
        if rank < 2:
            for _ in range(3):
                dist.all_reduce(torch.ones(2), group=first)
            dist.broadcast(torch.ones(5), 0, group=second)
        dist.all_reduce(torch.ones(4))
        if rank < 2:
            dist.destroy_process_group(first)
        again = dist.new_group([0, 1])
        if rank < 2:
            dist.barrier(group=again)
            dist.all_reduce(torch.ones(9), group=again)""",
    "gather and scatter": """
        t = torch.full((2,), float(rank))
        parts = [torch.empty(2) for _ in range(world_size)] if rank == 1 else None
        dist.gather(t, parts, dst=1)
        dist.scatter(t, parts, src=1)
        assert t[0] == rank
        dist.reduce(t, 0)
        dist.reduce(t, group_dst=1, op=dist.ReduceOp.MAX)""",
    "equal size, other shape": """
        dist.all_reduce(torch.ones(6) if rank else torch.ones(2, 3))
        both = torch.empty(2 * world_size)
        if rank:
            dist.all_gather_single(both, torch.ones(2))
        else:
            dist.all_gather(list(both.split(2)), torch.ones(2))""",
    "refused arguments": """
        for _ in range(rank + 1):
            try:
                dist.all_reduce("no tensor")
            except TypeError:
                pass
        for _ in range(20):
            try:
                dist.broadcast(torch.ones(3), src=99)
            except RuntimeError:
                pass
        dist.all_reduce(torch.ones(4))""",
    "coalesced and asynchronous": """
        ts = [torch.ones(n + 1) for n in range(5)]
        for work in [dist.all_reduce(t, async_op=True) for t in ts]:
            work.wait()
        assert all(int(t[0]) == world_size for t in ts)
        for n in range(300):
            dist.all_reduce(torch.ones(n % 7 + 1))""",
    "DDP": """
        from torch.nn.parallel import DistributedDataParallel
        torch.manual_seed(0)
        net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8),
                                                          torch.nn.BatchNorm1d(8)))
        for step in range(5):
            net(torch.randn(6 + rank, 4)).sum().backward()
            dist.all_reduce(torch.ones(1))
        with torch.distributed.algorithms.join.Join([net]):
            for step in range(2 + rank):
                net(torch.randn(6, 4)).sum().backward()""",
    "FSDP2 and DTensor": """
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters())
        for step in range(5):
            net(torch.randn(4 + rank, 5)).sum().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).full_tensor()
            optimizer.step()
        whole = torch.arange(35.0).reshape(7, 5)
        for placement in (Shard(0), Shard(1), Replicate()):
            d = distribute_tensor(whole, mesh, [placement])
            assert torch.equal(d.full_tensor(), whole)
        assert d.redistribute(mesh, [Shard(1)]).sum().full_tensor() == whole.sum()""",
}


@pytest.mark.parametrize("name", RIGHT)
def test_program_that_is_right_runs_to_its_end(ranks, name):
    lines = "\n".join(line[8:] for line in RIGHT[name].split("\n"))
    texts = ranks.run(lines + "\nprint('done')", timeout_seconds=60).text
    assert all(text.endswith("done\n") for text in texts.values()), texts


def test_trainer_with_checkpoint_and_uneven_rows_runs_to_its_end(ranks, tmp_path):
    ranks.push(None, where=str(tmp_path))
    source = """
from nbdist.train import CheckpointConfig, DecoderConfig, DecoderLM
from nbdist.train import TextData, TrainConfig, Trainer
data = TextData("to be or not to be, that is the question " * 60, context_length=16)
model = DecoderLM(DecoderConfig.tiny(data.vocab_size))
config = TrainConfig(
    num_steps=4, global_batch_size=7, checkpoint=CheckpointConfig(directory=where, every_steps=2)
)
print(len(Trainer(model, data, config).fit().losses))
"""
    texts = ranks.run(source, timeout_seconds=60).text
    assert all(text.split()[-1] == "4" for text in texts.values()), texts


# --- silent ranks ----------------------------------------------------------------------------


def test_note_says_who_waits_where_and_who_is_elsewhere(ranks, monkeypatch):
    monkeypatch.setenv("NBDIST_SILENT_SECONDS", "1.5")
    source = (
        "import time\n"
        "if rank == 1:\n"
        "    time.sleep(3.5)\n"
        "dist.all_reduce(torch.ones(4))\n"
        "time.sleep(0.8)\n"
    )
    events = [e for e in ranks.stream(source) if isinstance(e, CellNote)]
    notes = [e.text for e in events if not e.is_status]
    assert "rank 0: in all_reduce(sum) of float32 [4], call #" in notes[0]
    assert "line 4" in notes[0]
    assert "rank 1: not in a collective, Cell In[" in notes[0]
    assert "line 3" in notes[0]
    assert notes[1:] == ["The ranks go on."]


def test_cell_without_a_long_wait_has_no_note(ranks, monkeypatch):
    monkeypatch.setenv("NBDIST_SILENT_SECONDS", "1.5")
    source = "import time; time.sleep(2.5); dist.barrier()"
    notes = [e for e in ranks.stream(source) if isinstance(e, CellNote)]
    assert not [note for note in notes if not note.is_status]


def test_switch_takes_the_check_away():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "NBDIST_COLLECTIVE_CHECK", "0")
        with World.start(2) as world:
            world.run(SETUP)
            source = "dist.broadcast(t := torch.ones(4 if rank == 0 else 6), 0)"
            world.run(source)
            texts = world.run("print(dist.all_reduce.__module__, hasattr(dist.all_reduce, "
                              "'__wrapped__'), len(t))").text  # fmt: skip
            assert texts[1].split()[-1] == "6"
