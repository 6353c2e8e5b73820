"""Starts the processes of a world and takes them down again (client).

The controller and the ranks start at the same time: a rank imports torch and initialises MPI
while the controller comes up, and registers when it finds the controller's file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path

import zmq

import nbdist
from nbdist import keeper, runfiles
from nbdist.cluster.config import WorldConfig
from nbdist.cluster.mpi import Launcher
from nbdist.errors import StartError
from nbdist.runfiles import WorldRecord

__all__ = ["Processes", "log_tail"]

CONTROLLER_ARGS = [
    "--nodb",
    "--log-level=30",
    "--IPController.use_threads=True",
    "--IPController.enable_curve=True",
    # A registration ends with the next heartbeat; the default of 3 s is what one waits for.
    "--HeartMonitor.period=200",
    # A rank that computes in C for long, or is held in a debugger, is not dead.
    "--HeartMonitor.max_heartmonitor_misses=3000",
]


class Processes:
    """The controller, the MPI launcher with its ranks, and the keeper of one world.

    Attributes:
        record: what stands in the world's `world.json`.
    """

    def __init__(self, num_ranks: int, config: WorldConfig, launcher: Launcher) -> None:
        world_id, self.directory = runfiles.create()
        owner = os.getpid()
        self.record = WorldRecord(
            world_id=world_id,
            directory=str(self.directory),
            num_ranks=num_ranks,
            owner=[owner, keeper.start_ticks(owner)],
            keep=config.keep,
            started_at=time.time(),
            memory_directory=runfiles.create_in_memory(world_id),
        )
        self._config = config
        self._mpi = launcher
        self._children: list[subprocess.Popen[bytes]] = []
        self._keeper: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start everything; returns at once, the ranks come up on their own."""
        public, secret = zmq.curve_keypair()
        keys = {"public": public.decode("ascii"), "secret": secret.decode("ascii")}
        runfiles.write_json(self.directory / "keys.json", keys)
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(keeper.__file__), str(os.getpid())],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        program = [sys.executable, "-m", "nbdist.rank.engine", str(self.directory)]
        program.append(str(self.record.num_ranks))
        self._spawn("mpirun", self._mpi.arguments(self.record.num_ranks, program))
        controller = [sys.executable, "-m", "ipyparallel.controller", *CONTROLLER_ARGS]
        controller.append(f"--profile-dir={self.directory / 'profile'}")
        self._spawn("controller", controller)
        self.record.save()

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.directory / "logs" / f"{name}.log").open("ab") as log_file:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
        self._children.append(child)
        self.record.processes.append([child.pid, keeper.start_ticks(child.pid)])
        self._tell_keeper()

    def _tell_keeper(self) -> None:
        assert self._keeper is not None, "start() has made the keeper"
        assert self._keeper.stdin is not None, "the keeper has a pipe"
        state = {
            "processes": self.record.processes,
            "directory": self.record.directory,
            "memory_directory": self.record.memory_directory,
            "keep": self.record.keep,
        }
        self._keeper.stdin.write(json.dumps(state).encode("ascii") + b"\n")
        self._keeper.stdin.flush()

    def _environment(self) -> dict[str, str]:
        cores = len(os.sched_getaffinity(0))
        threads = self._config.threads_per_rank or max(1, cores // self.record.num_ranks)
        paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        home = str(Path(nbdist.__file__).parent.parent)
        if home not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
            paths.insert(0, home)
        defaults = {
            **self._mpi.environment(),
            "OMP_NUM_THREADS": str(threads),
            # Waiting threads of one rank must not take the cores of the others.
            "OMP_WAIT_POLICY": "PASSIVE",
            "GLOO_SOCKET_IFNAME": "lo",
            # A failed NCCL collective must not end the process that holds the user's state.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            # Activations are allocated and freed in every step. By default glibc gives them back
            # to the kernel and faults them in again, page by page (40,000 faults a step seen);
            # kept, and in huge pages, they cost 5 to 9% less of a small model's step.
            "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
            "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
            "MALLOC_TOP_PAD_": str(64 << 20),
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        }
        forced = {
            "NBDIST_INTERFACE": self._config.interface,
            "PYTHONPATH": os.pathsep.join(paths),
            # Nothing of a world is read from or written to the user's home.
            "IPYTHONDIR": str(self.directory / "profile"),
        }
        return {**defaults, **os.environ, **forced}

    def check(self, stage: str) -> None:
        """Raise StartError if the controller or the MPI launcher has ended."""
        for name, child in zip(("mpirun", "controller"), self._children, strict=True):
            if child.poll() is not None:
                raise StartError(
                    f"the world of {self.record.num_ranks} ranks did not start: {name} ended with "
                    f"exit code {child.returncode} while the ranks were at: {stage}; its log "
                    "below says why",
                    stage=stage,
                    log=log_tail(self.directory / "logs" / f"{name}.log"),
                )

    def stop(self, patience_seconds: float) -> None:
        """End the processes and remove the directory; waits for the ranks a moment first."""
        if self._children:
            with suppress(subprocess.TimeoutExpired):
                self._children[0].wait(patience_seconds)
        keeper.end(self.record.processes)
        for child in self._children:
            child.wait(5)
        if self._keeper is not None:
            self._keeper.kill()
            self._keeper.wait(5)
            if self._keeper.stdin is not None:
                self._keeper.stdin.close()
        self.record.remove_files()


def log_tail(path: Path, num_lines: int = 20) -> str:
    """Return the last lines of a log file; empty when there is none."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])


def end_world(record: WorldRecord) -> None:
    """End the processes of a world that another client started, and remove its directory."""
    keeper.end(record.processes)
    for pid, started in record.processes:
        if keeper.is_alive(int(pid), started):
            os.kill(int(pid), signal.SIGKILL)
    record.remove_files()
