"""Starts the processes of a world and takes them down again (client).

The controller and the ranks start at the same time: a rank imports torch and initialises MPI
while the controller comes up, and registers when it finds the controller's file.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import zmq

from nbdist import keeper, runfiles
from nbdist.cluster.causes import advice
from nbdist.cluster.config import WorldConfig
from nbdist.cluster.death import read_death
from nbdist.cluster.environment import rank_environment
from nbdist.cluster.mpi import Launcher, find_launcher
from nbdist.errors import StartError
from nbdist.runfiles import WorldRecord

__all__ = ["Processes", "Relaunch", "log_tail", "end_world"]

POLL_SECONDS = 0.01
LAUNCHER_SECONDS = 0.1
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

    Args:
        record: what stands in the world's `world.json`.
        config: how the world is started.
        launcher: starts ranks.
    """

    def __init__(self, record: WorldRecord, config: WorldConfig, launcher: Launcher) -> None:
        self.record = record
        self.directory = Path(record.directory)
        self._config = config
        self._mpi = launcher
        self._children: list[subprocess.Popen[bytes]] = []
        self._keeper: subprocess.Popen[bytes] | None = None

    @classmethod
    def create(cls, num_ranks: int, config: WorldConfig, launcher: Launcher) -> Processes:
        """Make the private directory of a new world."""
        world_id, directory = runfiles.create()
        owner = os.getpid()
        record = WorldRecord(
            world_id=world_id,
            directory=str(directory),
            num_ranks=num_ranks,
            owner=[owner, keeper.start_ticks(owner)],
            keep=config.keep,
            started_at=time.time(),
            memory_directory=runfiles.create_in_memory(world_id),
            settings={
                "mpi_command": launcher.command,
                "threads_per_rank": config.threads_per_rank,
                "interface": config.interface,
                "collective_timeout_seconds": config.collective_timeout_seconds,
                "spares": config.spares,
            },
        )
        return cls(record, config, launcher)

    @classmethod
    def of(cls, record: WorldRecord) -> Processes:
        """Return a handle by which a client that has not started a world can start ranks in it."""
        config = WorldConfig.of(**record.settings)
        return cls(record, config, find_launcher(config.mpi_command))

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
        self._spawn("mpirun", self._mpi.arguments(self.record.num_ranks, self._program()))
        controller = [sys.executable, "-m", "ipyparallel.controller", *CONTROLLER_ARGS]
        controller.append(f"--profile-dir={self.directory / 'profile'}")
        self._spawn("controller", controller)
        self.record.controller = self.record.processes[-1]
        self.record.save()

    def _program(self, *place: int | str) -> list[str]:
        words = [self.directory, self.record.num_ranks, *place]
        return [sys.executable, "-m", "nbdist.rank.supervisor", *map(str, words)]

    def start_again(self, local_ranks: dict[int, int]) -> list[Relaunch]:
        """Start processes that take the place of ranks that have ended.

        All ranks of a world come back under one launcher, in an MPI world like their first. A few
        come back under a launcher each: an MPI world takes nobody in.

        Args:
            local_ranks: `{rank: local rank}` of those to start.
        """
        self.record.refresh()
        num_ranks = self.record.num_ranks
        started = []
        if len(local_ranks) == num_ranks:
            # Nobody is left under the earlier launchers, which supervisors still hold.
            kept = [self.record.controller, *self.record.spares.values()]
            keeper.end([entry for entry in self.record.processes if entry not in kept])
            self.record.processes = kept
            child = self._spawn("mpirun", self._mpi.arguments(num_ranks, self._program()))
            started.append(Relaunch("mpirun", child))
        else:
            for rank, local_rank in local_ranks.items():
                name = f"mpirun-{rank}"
                child = self._spawn(name, self._mpi.arguments(1, self._program(rank, local_rank)))
                started.append(Relaunch(name, child))
        self.record.save()
        for entry in started:
            _reap(entry.child)
        return started

    def start_spares(self) -> None:
        """Start spares until there are as many as the world was started with; returns at once."""
        self.record.refresh()
        alive = {t: e for t, e in self.record.spares.items() if keeper.is_alive(int(e[0]), e[1])}
        for _ in range(self._config.spares - len(alive)):
            token = secrets.token_hex(4)
            program = self._program("spare", token)
            child = self._spawn(f"spare-{token}", self._mpi.arguments(1, program))
            alive[token] = self.record.processes[-1]
            _reap(child)
        self.record.spares = alive
        self.record.save()

    def _spawn(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.directory / "logs" / f"{name}.log").open("ab") as log_file:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env=rank_environment(self.record, self._config, self._mpi),
                start_new_session=True,
            )
        self._children.append(child)
        self.record.processes.append([child.pid, keeper.start_ticks(child.pid)])
        self._tell_keeper()
        return child

    def _tell_keeper(self) -> None:
        if self._keeper is None:  # another client's child; it reads `world.json`
            return
        assert self._keeper.stdin is not None, "the keeper has a pipe"
        state = {
            "processes": self.record.processes,
            "directory": self.record.directory,
            "memory_directory": self.record.memory_directory,
            "keep": self.record.keep,
        }
        self._keeper.stdin.write(json.dumps(state).encode("ascii") + b"\n")
        self._keeper.stdin.flush()

    def check(self, stage: str) -> None:
        """Raise StartError if the controller, the MPI launcher or a rank has ended."""
        for name, child in zip(("mpirun", "controller"), self._children, strict=False):
            if child.poll() is not None:
                self._fail(stage, name, f"{name} ended with exit code {child.returncode}")
        for path in (self.directory / "ranks").glob("*.exit"):
            with suppress(subprocess.TimeoutExpired):
                # The launcher still passes on what the rank has said at last.
                self._children[0].wait(0.5)
            death = read_death(self.directory, int(path.stem))
            assert death is not None, path
            self._fail(stage, "mpirun", f"a rank's process {death.in_words(self.record.num_ranks)}")

    def _fail(self, stage: str, log: str, what: str) -> NoReturn:
        path = self.directory / "logs" / f"{log}.log"
        raise StartError(
            f"the world of {self.record.num_ranks} ranks did not start: {what} while the ranks "
            f"were at: {stage}; {advice(log_tail(path, 200)) or 'the log below says why'}",
            stage=stage,
            log=log_tail(path),
        )

    def stop(self, patience_seconds: float) -> None:
        """End the processes and remove the directory; waits for the ranks a moment first."""
        self.record.refresh()
        if patience_seconds:
            self._wait_for_ranks(time.monotonic() + patience_seconds)
        keeper.end(self.record.processes)
        for child in self._children:
            child.wait(5)
        if self._keeper is not None:
            self._keeper.kill()
            self._keeper.wait(5)
            if self._keeper.stdin is not None:
                self._keeper.stdin.close()
        self.record.remove_files()

    def _wait_for_ranks(self, deadline: float) -> None:
        """Wait until the ranks have ended, and a moment for their launchers to see it."""
        pids = [
            int(json.loads(path.read_text())["pid"])
            for path in (self.directory / "ranks").glob("[0-9]*.json")
        ]
        while any(map(keeper.start_ticks, pids)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        # A launcher may still hold supervisors of ranks that died: it is not waited for.
        deadline = time.monotonic() + LAUNCHER_SECONDS
        spares = [entry[0] for entry in self.record.spares.values()]
        for launcher in [*self._children[:1], *self._children[2:]]:
            if launcher.pid in spares:
                continue
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(max(0.0, deadline - time.monotonic()))


@dataclass(frozen=True, slots=True)
class Relaunch:
    """A launcher that was started later than the world; `name` is its log's."""

    name: str
    child: subprocess.Popen[bytes]


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Wait in a thread for a launcher, which may end after this client has dropped the world."""
    threading.Thread(target=child.wait, daemon=True, name="nbdist-reaper").start()


def log_tail(path: Path, num_lines: int = 20) -> str:
    """Return the last lines of a log file; empty when there is none."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])


def end_world(record: WorldRecord) -> None:
    """End the processes of a world that another client started, and remove its directory."""
    record.refresh()
    keeper.end(record.processes)
    for pid, started in record.processes:
        if keeper.is_alive(int(pid), started):
            os.kill(int(pid), signal.SIGKILL)
    record.remove_files()
