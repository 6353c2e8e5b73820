"""How a rank died is told, and a replacement takes its place, with real ranks."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from nbdist import World, runfiles
from nbdist.errors import RankBusyError, RankLostError, RemoteCellError, StartError
from nbdist.messages import RankStream

# Every all_reduce of the values rank + 1 has an exact sum in float32.
SUM = (
    "import torch, torch.distributed as dist\n"
    "total = torch.tensor([rank + 1.0]); dist.all_reduce(total); print(int(total))"
)


def kill(world, rank):
    """End a rank from outside and wait until the world knows."""
    os.kill(world.infos[rank].pid, signal.SIGKILL)
    wait_until_lost(world, rank)


def wait_until_lost(world, rank):
    deadline = time.monotonic() + 5
    while rank not in world.lost_ranks:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def total_of(world):
    return {int(text) for text in world.run(SUM).text.values()}


@pytest.fixture(scope="module")
def healed_world():
    """A world of three ranks; each test leaves all of its ranks alive."""
    with World.start(3) as started:
        yield started
        assert started.lost_ranks == frozenset()


@pytest.mark.parametrize(
    ("death", "told"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", r"ended by SIGSEGV \(native code touched memory"),
        ("import os; os.abort()", r"ended by SIGABRT \(native code gave up\)"),
        ("import os; os._exit(3)", "ended with exit code 3"),
    ],
)
def test_death_in_a_collective_is_named_and_healed(healed_world, death, told):
    world = healed_world
    world.run(f"kept = rank + 7\n{SUM}")
    before = [info.pid for info in world.infos]

    started = time.monotonic()
    with pytest.raises(
        RankLostError, match=rf"rank 1 died .*: {told}.*`%distributed heal`"
    ) as lost:
        world.run(f"if rank == 1:\n    {death}\nelse: dist.barrier()")
    assert time.monotonic() - started < 2
    assert lost.value.ranks == (1,)
    if "native code" in told:
        log = Path(world.record.directory) / "logs" / "rank-1.log"
        assert "Fatal Python error" in log.read_text().rpartition("Current thread")[0]
        assert "`%distributed logs -r 1` ends with" in str(lost.value)
    assert world.heal() == [1]

    after = [info.pid for info in world.infos]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
    assert total_of(world) == {6}
    assert world.run("print(kept)", ranks="0,2").text == {0: "7\n", 2: "9\n"}
    with pytest.raises(RemoteCellError, match="rank 1 raised NameError"):
        world.run("kept", ranks=[1])
    place = "print(rank, world_size, local_rank, mesh.size())"
    assert world.run(place).text == {r: f"{r} 3 {r} 3\n" for r in range(3)}


def test_heal_with_nothing_lost_does_nothing(healed_world):
    before = [info.pid for info in healed_world.infos]
    assert healed_world.heal() == []
    assert [info.pid for info in healed_world.status()] == before


def test_heal_replaces_several_ranks_at_once(healed_world):
    healed_world.run("kept = 3")
    kill(healed_world, 0)
    kill(healed_world, 2)
    with pytest.raises(RankLostError, match=r"rank 0, 2 is wanted.*rank 0: killed .*; rank 2: "):
        healed_world.run("1")
    assert healed_world.heal() == [0, 2]
    assert total_of(healed_world) == {6}
    assert healed_world.run("print(kept)", ranks=[1]).text[1] == "3\n"


def test_heal_while_a_rank_that_stays_is_busy_is_refused(healed_world):
    other = World.attach(healed_world.world_id)
    stream = other.stream("import time; print('on'); time.sleep(30)", ranks=[0])
    try:
        assert any(isinstance(event, RankStream) for event in stream)
        kill(healed_world, 1)
        with pytest.raises(RankBusyError, match="but rank 0 runs a cell; wait"):
            healed_world.heal()
    finally:
        stream.close()
        other._link.close()
    assert healed_world.heal() == [1]


def test_survivor_runs_cells_before_the_heal(own_world):
    own_world.run(SUM)
    with pytest.raises(RankLostError):
        own_world.run("import time\nif rank == 1: import os; os._exit(3)\nwhile True: pass")
    assert own_world.run("print(rank)", ranks=[0]).text[0] == "0\n"


def test_pushed_names_come_back_and_lost_ones_are_named(own_world):
    own_world.push(everywhere=[1, 2])
    own_world.push([1], only_there="x")
    own_world.push([0], only_here="y")
    own_world.run("trained = rank")
    for _ in range(2):
        kill(own_world, 1)
        assert own_world.heal() == [1]
        assert own_world.pull("everywhere") == {0: [1, 2], 1: [1, 2]}
        assert own_world.pull("only_there", [1]) == {1: "x"}
        assert own_world.last_heal.pushed == {1: ["everywhere", "only_there"]}
        assert own_world.last_heal.gone == {1: ["only_here", "trained"]}
        assert own_world.last_heal.deaths == {1: "killed by SIGKILL"}
    assert total_of(own_world) == {3}


@pytest.mark.parametrize("at", ["starting", "waiting"])
def test_heal_that_is_stopped_leaves_no_second_process(own_world, at):
    kill(own_world, 1)

    def interrupt(text):
        if text.startswith(at):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        own_world.heal(interrupt)
    wait_until_lost(own_world, 1)
    assert own_world.heal() == [1]
    assert total_of(own_world) == {3}
    launchers = [p for p, _ in own_world.record.processes[2:] if psutil.pid_exists(int(p))]
    assert len(launchers) == 1


def test_replacement_that_does_not_start_names_its_log_and_can_be_tried_again(own_world):
    own_world.run(f"kept = 1\n{SUM}")
    kill(own_world, 1)
    keys = Path(own_world.record.directory) / "keys.json"
    text = keys.read_text()
    keys.write_text("{}")
    with pytest.raises(StartError, match=r"process for rank 1 was started, but it ended") as error:
        own_world.heal()
    assert "KeyError: 'public'" in error.value.log
    keys.write_text(text)
    assert own_world.run("print(kept)", ranks=[0]).text[0] == "1\n"
    assert own_world.heal() == [1]
    assert total_of(own_world) == {3}


def test_restart_of_all_ranks_gives_new_ones_in_one_mpi_world(own_world):
    own_world.push(kept=1)
    before = {info.pid for info in own_world.infos}
    assert own_world.restart() == [0, 1]
    assert before.isdisjoint(info.pid for info in own_world.infos)
    assert total_of(own_world) == {3}
    assert own_world.pull("kept") == {0: 1, 1: 1}
    assert own_world.last_heal.gone is None
    size = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"
    assert own_world.run(size).text == {0: "2\n", 1: "2\n"}


def test_restart_ends_a_rank_that_does_not_answer(own_world):
    os.kill(own_world.infos[1].pid, signal.SIGSTOP)
    assert own_world.restart([1]) == [1]
    assert total_of(own_world) == {3}


def test_world_healed_by_another_client_is_taken_up_by_its_owner(own_world):
    other = World.attach(own_world.world_id)
    kill(own_world, 1)
    wait_until_lost(other, 1)
    try:
        assert other.heal() == [1]
        pid = other.infos[1].pid
    finally:
        other._objects.close()
        other._link.close()
    assert own_world.heal() == [1]
    assert own_world.infos[1].pid == pid
    assert total_of(own_world) == {3}


def test_attach_finds_the_living_ranks_and_heals_the_lost_one(own_world):
    own_world.run("kept = rank + 7")
    own_world.push([0], here=1)
    own_world.run("import os, torch.distributed as dist")
    with pytest.raises(RankLostError):
        own_world.run("if rank == 1: os._exit(3)\ndist.barrier()")

    other = World.attach(own_world.world_id)
    try:
        assert other.lost_ranks == {1}
        assert [info.rank for info in other.status()] == [0]
        assert other.run("print(kept)", ranks=[0]).text[0] == "7\n"
        assert other.pull("here", [0]) == {0: 1}
        with pytest.raises(RankLostError, match=r"rank 1 is wanted.*ended with exit code 3"):
            other.run("1")
        assert other.heal() == [1]
        assert total_of(other) == {3}
        assert other.last_heal.deaths == {1: "ended with exit code 3"}
        kill(other, 0)
        kill(other, 1)
        third = World.attach(own_world.world_id)  # none of its ranks lives
        assert third.lost_ranks == {0, 1}
        assert third.heal() == [0, 1]
        assert total_of(third) == {3}
        third._objects.close()
        third._link.close()
    finally:
        other._objects.close()
        other._link.close()


def test_attach_and_stop_after_a_heal_leave_nothing():
    world = World.start(2)
    first_launcher = world.record.processes[0]
    kill(world, 0)
    world.heal()
    kill(world, 1)
    world.heal()  # nobody of the first launcher is left
    other = World.attach(world.world_id)
    assert total_of(other) == {3}
    record = runfiles.find_world(world.world_id)
    processes = [
        each
        for pid, _ in record.processes
        if pid != first_launcher[0] and psutil.pid_exists(int(pid))
        for each in (psutil.Process(int(pid)), *psutil.Process(int(pid)).children(recursive=True))
    ]
    assert len(processes) >= 7  # controller, two launchers, two supervisors, two ranks
    other._objects.close()
    other._link.close()
    world.stop()
    _, alive = psutil.wait_procs(processes, timeout=2)
    assert alive == []
    assert not Path(record.directory).exists()


def test_restart_and_heal_in_a_notebook_say_what_is_gone(notebook):
    notebook.run("pushed = 4\n%distributed push pushed")
    notebook.run("%%distributed\nmine = rank")
    cell = notebook.run("%distributed restart -r 1")
    assert cell.status == "ok", cell
    assert "rank 1 replaced in" in cell.displays[-1]["text/plain"]
    assert "pushed again to rank 1: pushed\n" in cell.out
    assert re.search(r"gone, while another rank has them, on rank 1: .*mine", cell.out)
    assert "had died" not in cell.out
    assert notebook.run("%%distributed\nprint(pushed)").out == "[0-1] 4\n"

    cell = notebook.run("%%distributed\nimport os\nif rank == 1: os._exit(3)")
    assert cell.ename == "RankLostError"
    assert "ended with exit code 3" in cell.evalue
    cell = notebook.run("%distributed heal")
    assert cell.out.startswith("rank 1 had died: ended with exit code 3\n")
    assert notebook.run("%distributed heal").out.endswith("is lost; nothing was done\n")
    assert notebook.run("%%distributed\nprint(world_size)").out == "[0-1] 2\n"
