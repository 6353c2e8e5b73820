"""A spare takes the place of a lost rank at once, and never outlives its world."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nbdist import World, runfiles
from nbdist.cluster import spares
from nbdist.notebook.tables import show_status

SUM = (
    "import torch, torch.distributed as dist\n"
    "total = torch.tensor([rank + 1.0]); dist.all_reduce(total); print(int(total), rank)"
)
WITH_SPARE = """
import os, signal, sys, time
from nbdist import World
world = World.start(1, spares=1)
while not world.num_spares_ready:
    time.sleep(0.05)
print(world.record.directory, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def wait_until(condition, seconds=40):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ready_spare(world):
    wait_until(lambda: world.num_spares_ready == 1)
    return spares.ready_spares(Path(world.record.directory))[0]


def kill(world, *ranks):
    for rank in ranks:
        os.kill(world.infos[rank].pid, signal.SIGKILL)
    wait_until(lambda: set(ranks) <= world.lost_ranks)


def of_world(directory):
    """Processes that were started for a world, known by its directory on their command lines."""
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if any(directory in part for part in p.info["cmdline"] or [])]


@pytest.fixture(scope="module")
def spared_world():
    """A world of three ranks and a spare; each test leaves all of its ranks alive."""
    with World.start(3, spares=1) as started:
        yield started
        assert started.lost_ranks == frozenset()
        spare = ready_spare(started)
    wait_until(lambda: not spare.is_alive, seconds=2)


def test_spare_is_no_rank_and_shown_in_the_status(spared_world, capsys):
    spare = ready_spare(spared_world)

    show_status(object(), spared_world)

    shown = capsys.readouterr().out
    assert "3 ranks, process group 0 verified, 1 of 1 spare ready\n" in shown
    assert str(spare.pid) not in shown
    assert [info.rank for info in spared_world.status()] == [0, 1, 2]


def test_heal_gives_the_place_to_the_spare_and_starts_another(spared_world):
    world = spared_world
    world.run("kept = rank + 7")
    world.push(pushed=4)
    for _ in range(2):
        spare = ready_spare(world)
        kill(world, 1)

        assert world.heal() == [1]

        assert world.infos[1].pid == spare.pid
        assert world.last_heal.group_seconds < 1
        assert world.last_heal.pushed == {1: ["pushed"]}
        assert world.run(SUM).text == {r: f"6 {r}\n" for r in range(3)}
        assert world.run("print(kept)", ranks="0,2").text == {0: "7\n", 2: "9\n"}
        assert world.run("print(local_rank, mesh.size(), pushed)").text[1] == "1 3 4\n"


def test_restart_of_one_rank_takes_the_spare(spared_world):
    spare = ready_spare(spared_world)
    assert spared_world.restart([2]) == [2]
    assert spared_world.infos[2].pid == spare.pid
    assert spared_world.run(SUM).text == {r: f"6 {r}\n" for r in range(3)}


def test_more_lost_ranks_than_spares_get_new_processes_as_well(spared_world):
    spare = ready_spare(spared_world)
    kill(spared_world, 0, 2)
    assert spared_world.heal() == [0, 2]
    assert spared_world.infos[0].pid == spare.pid
    assert spared_world.run(SUM).text == {r: f"6 {r}\n" for r in range(3)}


def test_spare_that_does_not_answer_is_ended_and_replaced(spared_world, monkeypatch):
    monkeypatch.setattr(spares, "TAKE_SECONDS", 0.5)
    spare = ready_spare(spared_world)
    os.kill(spare.pid, signal.SIGSTOP)
    kill(spared_world, 1)

    assert spared_world.heal() == [1]

    assert not spare.is_alive
    assert spared_world.infos[1].pid != spare.pid
    assert spared_world.run(SUM).text == {r: f"6 {r}\n" for r in range(3)}


def test_heal_stopped_while_the_spare_takes_the_place_ends_the_spare(spared_world, monkeypatch):
    spare = ready_spare(spared_world)
    kill(spared_world, 1)

    def stopped(*_arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(spares.starting, "wait_until_registered", stopped)
        with pytest.raises(KeyboardInterrupt):
            spared_world.heal()
    wait_until(lambda: not spare.is_alive)
    assert spared_world.lost_ranks == {1}
    assert spared_world.heal() == [1]
    assert spared_world.run(SUM).text == {r: f"6 {r}\n" for r in range(3)}


def test_another_client_heals_with_the_spare_and_starts_another(spared_world):
    other = World.attach(spared_world.world_id)
    spare = ready_spare(other)
    kill(spared_world, 1)
    wait_until(lambda: 1 in other.lost_ranks)
    try:
        assert other.heal() == [1]
        assert other.infos[1].pid == spare.pid
        assert ready_spare(spared_world).pid != spare.pid
    finally:
        other._objects.close()
        other._link.close()
    assert spared_world.heal() == [1]
    assert spared_world.infos[1].pid == spare.pid


def test_stop_ends_a_spare_that_comes_up():
    world = World.start(1, spares=1)
    processes = of_world(world.record.directory)
    assert [p for p in processes if "spare" in p.cmdline()]

    world.stop()

    _, alive = psutil.wait_procs(processes, timeout=2)
    assert alive == []
    assert not Path(world.record.directory).exists()


def test_spare_ends_when_the_client_is_killed():
    client = subprocess.run(
        [sys.executable, "-c", WITH_SPARE], capture_output=True, text=True, timeout=60, check=False
    )
    directory = client.stdout.strip()
    assert runfiles.base_directory() == Path(directory).parent, client.stderr
    wait_until(lambda: not of_world(directory) and not Path(directory).exists(), seconds=10)


@pytest.mark.parametrize("spares", [-1, 1.5, True])
def test_number_of_spares_that_is_none_is_refused(spares):
    with pytest.raises(ValueError, match=r"spares=.* is not a number of processes; give 0 or more"):
        World.start(2, spares=spares)
