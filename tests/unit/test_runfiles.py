"""The registry of worlds is private and tells the living from the dead."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist import keeper, runfiles
from nbdist.errors import NoWorldError, StartError


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("NBDIST_RUN_DIR", str(tmp_path))
    return tmp_path


def make_record(processes, started_at=0.0):
    """Make a world whose first process is its controller."""
    world_id, directory = runfiles.create()
    record = runfiles.WorldRecord(
        world_id=world_id,
        directory=str(directory),
        num_ranks=2,
        processes=processes,
        controller=processes[0],
        started_at=started_at,
    )
    record.save()
    return record


def me():
    return [os.getpid(), keeper.start_ticks(os.getpid())]


def parent():
    return [os.getppid(), keeper.start_ticks(os.getppid())]


def test_world_directory_is_private(run_dir):
    _, directory = runfiles.create()
    assert directory.is_relative_to(run_dir)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.parent.stat().st_mode & 0o777 == 0o700


def test_base_directory_open_to_others_is_refused(run_dir):
    runfiles.base_directory().chmod(0o755)
    with pytest.raises(StartError, match=r"must be private .*755; set NBDIST_RUN_DIR"):
        runfiles.base_directory()


def test_list_worlds_shows_only_living_ones(run_dir):
    dead = [os.getpid(), 12345.0]
    alive = make_record([me(), parent()])
    healed = make_record([me(), dead, parent()], 1.0)
    make_record([me(), dead])
    make_record([dead, me()])
    assert [w.world_id for w in runfiles.list_worlds()] == [alive.world_id, healed.world_id]


def test_record_takes_in_processes_that_another_client_added(run_dir):
    record = make_record([me()])
    other = make_record([me()])
    other.directory, other.processes = record.directory, [me(), parent()]
    other.save()
    record.refresh()
    assert record.processes == [me(), parent()]


def test_find_world_without_any_says_how_to_start(run_dir):
    with pytest.raises(NoWorldError, match="running worlds: none; start one with"):
        runfiles.find_world(None)


def test_find_world_with_several_asks_for_a_name(run_dir):
    first = make_record([me(), parent()], 1.0)
    second = make_record([me(), parent()], 2.0)
    with pytest.raises(NoWorldError, match=f"2 worlds run: {first.world_id}, {second.world_id}"):
        runfiles.find_world(None)
    assert runfiles.find_world(second.world_id).world_id == second.world_id


def test_keeper_ends_processes_and_files_when_its_owner_dies(run_dir):
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watched = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    # The owner has told of nothing: another client has added the process.
    record = make_record([[watched.pid, keeper.start_ticks(watched.pid)]])
    state = f'{{"processes": [], "directory": "{record.directory}", "keep": false}}'
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", keeper.__file__, str(owner.pid)], stdin=subprocess.PIPE
    )
    guard.stdin.write(state.encode() + b"\n")
    guard.stdin.flush()

    owner.kill()
    owner.wait()
    guard.stdin.close()  # as the end of an owner does

    assert guard.wait(10) == 0
    assert watched.wait(1) == -15
    assert not Path(record.directory).exists()
    owner.stdin.close()
