"""A start that fails names its stage and its cause, and leaves nothing."""

import os
import socket
from pathlib import Path

import psutil
import pytest

from nbdist import World, runfiles
from nbdist.cluster import launch
from nbdist.cluster.mpi import find_launcher
from nbdist.errors import StartError


def processes_of_worlds():
    """Processes started for any world of this test run, known by its run directory."""
    where = str(runfiles.base_directory())
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(where in part for part in process.info["cmdline"] or []):
            found.append(process)
    return found


@pytest.fixture
def nothing_is_left():
    """Checks after a test that nothing of its worlds runs or lies about."""
    before = processes_of_worlds()
    yield
    left = [p for p in processes_of_worlds() if p not in before]
    _, alive = psutil.wait_procs(left, timeout=3)
    assert alive == []
    assert list(Path(runfiles.base_directory()).iterdir()) == []


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    ("settings", "stage", "text"),
    [
        ({"interface": "203.0.113.1"}, "MPI start", "interface= is no address of this host"),
        ({"timeout_seconds": 0.3}, None, "give it more time with timeout_seconds="),
        ({"mpi_command": "/no/mpirun"}, "find MPI", "type `pip install 'nbdist[mpi]'`"),
    ],
)
def test_failed_start_names_stage_and_cause_and_leaves_nothing(settings, stage, text):
    with pytest.raises(StartError) as caught:
        World.start(2, **settings)

    assert text in str(caught.value)
    assert caught.value.stage == stage or stage is None


@pytest.mark.usefixtures("nothing_is_left")
def test_launcher_without_slots_says_how_to_share_cores(monkeypatch):
    if find_launcher().flavour != "openmpi":
        pytest.skip("MPICH counts no slots")
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", ":nooversubscribe")
    monkeypatch.setenv("OMPI_MCA_rmaps_base_oversubscribe", "0")
    with pytest.raises(StartError, match="fewer slots than ranks: start fewer") as caught:
        World.start(500)
    assert caught.value.stage == "MPI start"
    assert "slots" in caught.value.log


@pytest.mark.usefixtures("nothing_is_left")
def test_port_that_is_taken_is_named_and_start_can_be_typed_again(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = f"--ports={taken.getsockname()[1]}"
        monkeypatch.setattr(launch, "CONTROLLER_ARGS", [*launch.CONTROLLER_ARGS, ports])
        with pytest.raises(StartError, match=r"controller ended .*: type the start") as caught:
            World.start(1)
    assert "Address already in use" in caught.value.log


# Read by every rank before anything else: its host has one GPU, as the rank's binding sees it.
ONE_GPU = """
import sys
if any("nbdist.rank.supervisor" in word for word in sys.orig_argv):
    import nbdist.rank.binding as binding
    from dataclasses import replace
    from types import SimpleNamespace
    def bind_device(local_rank):
        import torch
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 1
        torch.cuda.set_device = lambda _device: None
        torch.cuda.get_device_properties = lambda _d: SimpleNamespace(name="A", total_memory=1)
        return replace(bind(local_rank), name="cpu")  # the rank that has it waits for the other
    bind, binding.bind_device = binding.bind_device, bind_device
"""


@pytest.mark.usefixtures("nothing_is_left")
def test_two_ranks_on_one_gpu_say_how_many_to_start(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(ONE_GPU)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(StartError) as caught:
        World.start(2)
    assert caught.value.stage == "process group"
    assert "rank 1 cannot join the process group" in str(caught.value)
    assert "needs a GPU of its own, but this host has 1; start 1 ranks" in str(caught.value)


@pytest.mark.usefixtures("nothing_is_left")
def test_interface_that_is_not_there_says_what_to_set(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere9")
    with pytest.raises(StartError, match=r"nowhere9; .*`%env GLOO_SOCKET_IFNAME=lo`") as caught:
        World.start(1)
    assert caught.value.stage == "process group"


def test_start_with_more_ranks_than_cores_works():
    ranks = len(os.sched_getaffinity(0)) + 1
    with World.start(ranks) as world:
        assert world.run("print(world_size)").text == dict.fromkeys(range(ranks), f"{ranks}\n")
