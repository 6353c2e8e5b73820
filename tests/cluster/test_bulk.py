"""Push and pull of large values: whole, independent, and nothing left behind."""

import os
import stat
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from nbdist import World
from nbdist.cluster import objects
from nbdist.errors import RemoteCellError

MB = 1 << 20


def leftovers(world):
    """Return the files of transfers that still lie about."""
    homes = (world.record.memory_directory, world.record.directory)
    return [path for home in homes for path in Path(home).glob("transfer-*")]


@pytest.fixture(params=["two ranks", "three ranks"])
def any_world(request):
    return request.getfixturevalue("world" if request.param == "two ranks" else "world3")


def test_push_carries_large_tensors_anywhere_in_a_value(any_world):
    generator = torch.Generator().manual_seed(0)
    state = {f"w{i}": torch.randn(600, 700, generator=generator) for i in range(3)}
    halves = torch.randn(2 * MB, generator=generator).to(torch.bfloat16)
    any_world.push(state=state, mixed=[halves, ("text", np.arange(MB))], small=7)
    any_world.run(
        "import torch\nfound = (state['w1'].sum(dtype=torch.float64).item(), "
        "mixed[0].view(torch.int16).sum().item(), int(mixed[1][1].sum()), mixed[1][0], small)"
    )
    expected = (
        state["w1"].sum(dtype=torch.float64).item(),
        halves.view(torch.int16).sum().item(),
        int(np.arange(MB).sum()),
        "text",
        7,
    )
    # One thread sums here and there, in the same order: equal to the last bit.
    assert any_world.pull("found") == dict.fromkeys(range(any_world.num_ranks), expected)
    assert leftovers(any_world) == []


def test_pushed_values_are_writable_and_each_ranks_own(any_world):
    value = np.zeros(MB)
    any_world.push(value=value)
    any_world.run("value += rank + 1")
    pulled = any_world.pull("value")
    for rank in range(any_world.num_ranks):
        assert np.array_equal(pulled[rank], np.full(MB, rank + 1.0))
        pulled[rank] += 1
    assert value.sum() == 0
    assert np.array_equal(any_world.pull("value")[0], np.full(MB, 1.0))


def test_pull_returns_each_ranks_nested_value_bitwise(any_world):
    any_world.run(
        "import torch\ng = torch.Generator().manual_seed(rank)\n"
        "deep = {'t': [torch.randn(1 << 19, generator=g).bfloat16()], 'rank': rank}\n"
        "class Holder: pass\nheld = Holder(); held.net = torch.nn.Linear(1024, 512)"
    )
    pulled = any_world.pull("deep")
    for rank in range(any_world.num_ranks):
        generator = torch.Generator().manual_seed(rank)
        expected = torch.randn(1 << 19, generator=generator).bfloat16()
        assert pulled[rank]["rank"] == rank
        assert torch.equal(pulled[rank]["t"][0].view(torch.int16), expected.view(torch.int16))
    held = any_world.pull("held", ranks=[1])
    assert list(held) == [1]
    assert held[1].net.weight.shape == (512, 1024)
    assert any_world.pull("held.net.weight", ranks="0")[0].is_leaf
    assert leftovers(any_world) == []


def test_failed_pull_names_the_rank_and_leaves_no_file(world):
    world.run("import numpy as np\nif rank == 0: one = np.ones(1 << 20)")
    with pytest.raises(RemoteCellError, match="rank 1 raised NameError: name 'one' is not defined"):
        world.pull("one")
    assert leftovers(world) == []


def test_nothing_large_passes_the_controller(world):
    controller = psutil.Process(int(world.record.processes[1][0]))
    world.push(warm=1)
    before = controller.memory_info().rss
    world.push(value=np.ones(8 * MB))
    world.pull("value")
    assert controller.memory_info().rss - before < 16 * MB  # 64 MiB went each way, twice


def test_ranks_on_other_hosts_are_reached_without_files(world, monkeypatch):
    monkeypatch.setattr(objects, "is_on_one_host", lambda _infos: False)
    world.push(value=np.arange(MB))
    assert np.array_equal(world.pull("value")[1], np.arange(MB))


def test_directory_in_memory_is_private_and_ends_with_the_world():
    with World.start(2) as world:
        directory = Path(world.record.memory_directory)
        assert directory.parent == Path("/dev/shm")
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert directory.stat().st_uid == os.getuid()
    assert not directory.exists()


def test_keeper_removes_the_directory_in_memory(bare_notebook):
    bare_notebook.run("%distributed start -n 2")
    shown = "import nbdist; r = nbdist.current_world().record; print(r.memory_directory)"
    directory = Path(bare_notebook.run(shown).out.strip())
    assert directory.is_dir()
    pids = "print([int(pid) for pid, _ in r.processes])"
    processes = [psutil.Process(pid) for pid in eval(bare_notebook.run(pids).out)]
    keepers = [
        child
        for child in psutil.Process(bare_notebook.manager.provisioner.pid).children()
        if any(part.endswith("keeper.py") for part in child.cmdline())
    ]
    bare_notebook.manager.signal_kernel(9)
    _, alive = psutil.wait_procs([*processes, *keepers], timeout=10)
    assert alive == []
    assert not directory.exists()
