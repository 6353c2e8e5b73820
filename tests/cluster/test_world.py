"""The Python face: run, stream, apply, push, pull, attach, stop."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from nbdist import World, keeper, runfiles
from nbdist.errors import (
    CellTimeoutError,
    NoWorldError,
    RankBusyError,
    RankLostError,
    RemoteCellError,
)
from nbdist.messages import Interrupt, RankDone, RankStream, RunCell


def pids_of(world):
    """Every process of a world: controller, launcher, ranks and their children."""
    found = set()
    for pid, _ in world.record.processes:
        process = psutil.Process(int(pid))
        found |= {process, *process.children(recursive=True)}
    return found


def assert_all_gone(processes, within_seconds):
    gone, alive = psutil.wait_procs(processes, timeout=within_seconds)
    assert alive == []
    assert len(gone) == len(processes)


def test_start_gives_each_rank_its_place_and_a_verified_group(world3):
    infos = world3.infos
    assert [i.rank for i in infos] == [0, 1, 2]
    assert [i.local_rank for i in infos] == [0, 1, 2]
    assert {i.world_size for i in infos} == {3}
    assert {i.generation for i in infos} == {0}
    assert len({i.pid for i in infos}) == 3
    total = (
        "import torch, torch.distributed as dist\n"
        "x = torch.tensor([float(rank)]); dist.all_reduce(x); print(x.item())"
    )
    assert set(world3.run(total).text.values()) == {"3.0\n"}


def test_cell_finds_the_names_of_its_rank(world):
    result = world.run("print(rank, world_size, local_rank, device, mesh.size(), nbdist.__name__)")
    assert result.text == {0: "0 2 0 cpu 2 nbdist\n", 1: "1 2 1 cpu 2 nbdist\n"}
    assert set(result.seconds) == {0, 1}


def test_names_of_the_user_are_kept_between_cells_and_not_overwritten(own_world):
    own_world.run("kept = rank * 10\nmesh = 'mine'")
    with pytest.raises(RemoteCellError):
        own_world.run("if rank == 0: raise ValueError\nimport torch; torch.distributed.barrier()")
    assert own_world.run("print(kept, mesh)").text == {0: "0 mine\n", 1: "10 mine\n"}


def test_run_on_a_subset_leaves_the_others_alone(world3):
    assert world3.run("print(rank)", ranks="0,2").text == {0: "0\n", 2: "2\n"}
    assert world3.run("print(rank)", ranks=[-1]).text == {2: "2\n"}


def test_ipython_on_ranks_is_real(world):
    source = (
        "%time x = 1\n"
        "import asyncio, subprocess, sys, os\n"
        "await asyncio.sleep(0.05)\n"
        "!echo shell\n"
        "os.system('echo system')\n"
        "subprocess.run(['echo', 'child'])\n"
        "print('to stderr', file=sys.stderr)\n"
        "import ctypes; ctypes.CDLL(None).puts(b'from C')\n"
        "{'value': rank}"
    )
    result = world.run(source)
    for rank in (0, 1):
        for part in ("Wall time", "shell", "system", "child", "to stderr", "from C"):
            assert part in result.text[rank]
        assert result.displays[rank][-1]["data"]["text/plain"] == f"{{'value': {rank}}}"


def test_async_cell_returns_and_its_error_is_an_error(world):
    assert (
        world.run("import asyncio\nawait asyncio.sleep(0.05); print('slept')").text[0] == "slept\n"
    )
    with pytest.raises(RemoteCellError, match="KeyError"):
        world.run("await asyncio.sleep(0); raise KeyError('k')")
    assert world.run("print('next')").text[1] == "next\n"


def test_rich_display_arrives_as_mime_bundle(world):
    source = "from IPython.display import HTML, display\ndisplay(HTML('<b>r</b>'))"
    assert world.run(source).displays[1][0]["data"]["text/html"] == "<b>r</b>"


def test_stream_yields_text_while_the_cell_runs(world):
    source = "import time\nfor i in range(3):\n    print(i); time.sleep(0.2)"
    times, texts = [], []
    for event in world.stream(source, ranks=[0]):
        if isinstance(event, RankStream):
            times.append(time.monotonic())
            texts.append((event.seq, event.text))
    assert "".join(text for _, text in texts) == "0\n1\n2\n"
    assert [seq for seq, _ in texts] == list(range(len(texts)))
    assert times[-1] - times[0] > 0.25


def test_large_output_arrives_whole_and_in_order(world):
    result = world.run("for i in range(50000): print(i, 'x' * 20)")
    expected = "".join(f"{i} {'x' * 20}\n" for i in range(50000))
    assert result.text == {0: expected, 1: expected}


def test_failure_is_one_error_with_the_ranks_own_traceback(world):
    with pytest.raises(RemoteCellError, match="rank 1 raised ValueError: boom") as caught:
        world.run("def fail():\n    raise ValueError('boom')\nif rank == 1:\n    fail()")
    assert caught.value.rank == 1
    assert "fail()" in caught.value.traceback
    assert caught.value.others == {}


@pytest.mark.parametrize("call", ["dist.barrier()", "dist.recv(torch.ones(1), 1)"])
def test_rank_that_raises_frees_the_one_that_waits_in_a_collective(world, call):
    world.run("import torch, torch.distributed as dist; kept = rank")
    started = time.monotonic()
    with pytest.raises(RemoteCellError, match="rank 1 raised ValueError: boom; then rank 0"):
        world.run(f"if rank == 1: raise ValueError('boom')\n{call}")
    assert time.monotonic() - started < 5
    after = "x = torch.ones(1); dist.all_reduce(x); print(kept, x.item())"
    assert world.run(after).text == {0: "0 2.0\n", 1: "1 2.0\n"}


def test_error_that_is_slow_to_show_frees_the_others_at_once_and_breaks_no_group(world):
    source = (
        "import time, torch.distributed as dist\n"
        "class Slow(Exception):\n"
        "    def __str__(self): time.sleep(0.4); return 'slow'\n"
    )
    generations = {info.generation for info in world.status()}
    with pytest.raises(RemoteCellError, match="Slow: slow"):
        world.run(source + "raise Slow")
    world.run("pass")
    assert {info.generation for info in world.status()} == generations
    with pytest.raises(RemoteCellError, match="rank 1 raised Slow: slow; then rank 0"):
        world.run(source + "if rank == 0:\n    dist.barrier()\nraise Slow")


def test_timeout_stops_the_cell_and_keeps_names(world):
    with pytest.raises(CellTimeoutError, match=r"longer than --timeout 0.5 seconds"):
        world.run("n = 41\nimport time\nn += 1\ntime.sleep(60)", timeout_seconds=0.5)
    assert world.run("print(n)").text[0] == "42\n"


def test_syntax_error_and_bad_ranks_touch_no_rank(world):
    with pytest.raises(SyntaxError):
        world.run("touched = True\nx = = 1")
    with pytest.raises(ValueError, match="ranks 0 to 1"):
        world.run("touched = True", ranks=[7])
    assert world.run("print('touched' in globals())").text[0] == "False\n"


@pytest.mark.parametrize(
    "source",
    ["while True: pass", "import time; time.sleep(60)", "import asyncio; await asyncio.sleep(60)"],
)
def test_interrupt_from_another_thread_stops_the_cell(world, source):
    threading.Timer(0.5, world.interrupt).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        world.run(source)
    assert time.monotonic() - started < 3
    assert world.run("print('next')").text == {0: "next\n", 1: "next\n"}


def test_interrupt_during_an_import_leaves_the_module_whole(world, tmp_path):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(1.0)\ndone = True\n")
    world.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    threading.Timer(0.4, world.interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        world.run("import slow_to_import\nwhile True: pass")
    assert world.run("print(sys.modules['slow_to_import'].done)").text[0] == "True\n"


def test_apply_runs_closures_and_returns_in_rank_order(world):
    factor = 3
    world.run("base = rank")
    assert world.apply(lambda x: x * factor, 2) == [6, 6]
    assert world.apply(os.getpid) == [i.pid for i in world.infos]
    assert world.apply(lambda: 1, ranks=[1]) == [1]
    with pytest.raises(RemoteCellError, match="rank 0 raised ZeroDivisionError"):
        world.apply(lambda: 1 / 0)


def test_push_and_pull_carry_classes_defined_on_either_side(world):
    world.run("class Point:\n    def __init__(self, x): self.x = x\np = Point(rank)")
    assert {rank: p.x for rank, p in world.pull("p").items()} == {0: 0, 1: 1}
    world.push(numbers=[1, 2], double=lambda x: 2 * x)
    assert world.run("print(double(sum(numbers)))").text[1] == "6\n"
    with pytest.raises(RemoteCellError, match="no_such_name"):
        world.pull("no_such_name")


def test_second_client_attaches_and_finds_the_variables(world):
    world.run("shared = rank + 100")
    other = World.attach(world.world_id)
    try:
        assert other.run("print(shared)").text == {0: "100\n", 1: "101\n"}
        assert other.pull("shared") == {0: 100, 1: 101}
    finally:
        other._objects.close()
        other._link.close()


def test_cell_sent_while_another_clients_runs_is_refused(world):
    other = World.attach(world.world_id)
    stream = world.stream("import time; print('on'); time.sleep(3)")
    try:
        for event in stream:
            if isinstance(event, RankStream):
                break
        with pytest.raises(RankBusyError, match=r"was not run: rank .* still runs cell"):
            other.run("print(1)")
    finally:
        stream.close()
        other._link.close()
    assert world.run("print(2)").text[0] == "2\n"


def test_two_worlds_live_side_by_side(world):
    with World.start(2) as other:
        assert other.world_id != world.world_id
        other.run("only_here = 1")
        assert world.run("print('only_here' in globals())").text[0] == "False\n"
    assert world.run("print(1)").text[0] == "1\n"


def test_killed_rank_ends_its_cell_and_spares_the_other(own_world):
    own_world.run("kept = 5")
    started = time.monotonic()
    with pytest.raises(RankLostError, match="rank 1 died while the cell ran") as caught:
        own_world.run("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert time.monotonic() - started < 2
    assert caught.value.ranks == (1,)
    assert own_world.run("print(kept)", ranks=[0]).text[0] == "5\n"
    with pytest.raises(RankLostError, match="rank 1 is wanted, but its process is gone"):
        own_world.run("1")


def test_stop_leaves_no_process_and_no_file():
    world = World.start(2)
    processes = pids_of(world)
    assert len(processes) >= 4
    world.stop()
    assert_all_gone(processes, within_seconds=3)
    assert not Path(world.record.directory).exists()
    with pytest.raises(NoWorldError, match="has been stopped"):
        world.run("1")
    world.stop()


@pytest.mark.parametrize("keep", [False, True])
def test_owner_killed_leaves_nothing_unless_kept(keep):
    script = (
        f"from nbdist import World\nw = World.start(2, keep={keep})\nw.run('x = rank + 7')\n"
        "print(w.world_id, flush=True)\ninput()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    world_id = owner.stdout.readline().strip()
    record = runfiles.find_world(world_id)
    processes = [psutil.Process(int(pid)) for pid, _ in record.processes]
    owner.kill()
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()

    if keep:
        with World.attach(world_id) as found:
            assert found.pull("x") == {0: 7, 1: 8}
    assert_all_gone(processes, within_seconds=10)
    deadline = time.monotonic() + 5
    while Path(record.directory).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(record.directory).exists()


def test_launcher_killed_takes_its_ranks_along(own_world):
    launcher = psutil.Process(int(own_world.record.processes[0][0]))
    ranks = [psutil.Process(info.pid) for info in own_world.infos]
    assert keeper.is_alive(launcher.pid, own_world.record.processes[0][1])
    launcher.kill()
    assert_all_gone(ranks, within_seconds=5)


def test_stop_that_comes_before_the_cell_has_begun_stops_it(world):
    ended, endings = threading.Event(), []

    def take(rank, event):
        endings.append(event)
        ended.set()

    end = world.subscribe(RankDone, take)
    for number in range(5):
        ended.clear()
        cell_id = f"early-{number}"
        world.post(0, RunCell(cell_id=cell_id, source="while True: pass", ranks=(0,)))
        world.post(0, Interrupt(cell_id=cell_id))
        assert ended.wait(2)
    end()
    assert [event.status for event in endings] == ["interrupted"] * 5
