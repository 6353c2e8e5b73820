"""Run functions on several ranks, and control time, in tests (anywhere; torch-free here).

For nbdist's own tests and for its users': `run_ranks` needs no MPI, no notebook and no GPU.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.errors import RankLostError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

__all__ = ["ManualClock", "run_ranks"]

# imported once by the fork server, so that a rank starts in milliseconds
_PRELOAD = [
    "torch",
    "torch._dynamo",  # every torch optimizer imports it: a second
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
]
_GRACE_SECONDS = 5.0  # for the ranks that one failed rank leaves in a collective


class ManualClock:
    """A monotonic clock that moves only when told; pass it where `time.monotonic` is expected."""

    def __init__(self, start_seconds: float = 0.0) -> None:
        self.seconds = start_seconds

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.seconds

    def advance(self, seconds: float) -> None:
        """Move the clock forward.

        Raises:
            ValueError: `seconds` is below 0.
        """
        if seconds < 0:
            raise ValueError(
                f"the clock was asked to advance by {seconds} s: a monotonic clock never goes "
                "back; pass seconds >= 0"
            )
        self.seconds += seconds


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 60
) -> list[Any]:
    """Return `[fn(rank, *args) for every rank]`, each run in a fresh process of one gloo group.

    The default process group is ready when `fn` starts; each rank has one compute thread. No
    process is left when this returns or raises.

    Args:
        fn: a module-level function; it, its arguments and its results are pickled.
        world_size: number of ranks.
        *args: handed to every rank after its rank.
        timeout_seconds: for all ranks together, and for each collective.

    Raises:
        ValueError: `fn` cannot be imported by another process, or `world_size` is below 1.
        TimeoutError: a rank did not end in time; names the ranks and shows where they stood.
        RankLostError: a rank's process ended without an answer.
        Exception: whatever `fn` raised first, with the rank and its traceback as a note.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} leaves no rank to run; set world_size >= 1")
    target = _Target.of(fn)
    with tempfile.TemporaryDirectory(prefix="nbdist-ranks-") as directory:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        deadline = time.monotonic() + timeout_seconds
        run = _Run()
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                spec = _Spec(rank, world_size, directory, timeout_seconds, target, args)
                process = context.Process(target=_rank_main, args=(spec, theirs), daemon=True)
                process.start()
                theirs.close()  # or the end of the rank would not be seen
                run.add(rank, process, ours)
            run.collect(deadline, fn.__name__, timeout_seconds, Path(directory))
        finally:
            run.reap()
    if run.failures:
        raise min(run.failures, key=lambda failure: failure[0])[1]
    return [pickle.loads(run.results[rank]) for rank in range(world_size)]  # noqa: S301 - our own


@dataclass(frozen=True, slots=True)
class _Target:
    """How another process finds a function: by import, else by file."""

    module: str
    name: str
    file: str

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> _Target:
        if "<" in fn.__qualname__ or getattr(sys.modules[fn.__module__], "__file__", None) is None:
            raise ValueError(
                f"run_ranks was given {fn.__qualname__!r} of module {fn.__module__!r}, which "
                "another process cannot import; define it at the top level of a file"
            )
        return cls(fn.__module__, fn.__qualname__, str(sys.modules[fn.__module__].__file__))

    def load(self) -> Callable[..., Any]:
        module = sys.modules.get("__mp_main__" if self.module == "__main__" else self.module)
        if module is None:
            try:
                module = importlib.import_module(self.module)
            except ModuleNotFoundError:  # a test file that is on no import path
                spec = importlib.util.spec_from_file_location(self.module, self.file)
                assert spec is not None, f"{self.file} is no Python file"
                assert spec.loader is not None, f"{self.file} has no loader"
                module = importlib.util.module_from_spec(spec)
                sys.modules[self.module] = module
                spec.loader.exec_module(module)
        found: Any = module
        for part in self.name.split("."):
            found = getattr(found, part)
        return found  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Spec:
    rank: int
    world_size: int
    directory: str
    timeout_seconds: float
    target: _Target
    args: tuple[Any, ...]


@dataclass(slots=True)
class _Run:
    """The processes of one `run_ranks` and what came back of them."""

    processes: dict[int, BaseProcess] = field(default_factory=dict)
    waiting: dict[int, Connection[Any, Any]] = field(default_factory=dict)
    results: dict[int, bytes] = field(default_factory=dict)
    failures: list[tuple[float, BaseException]] = field(default_factory=list)  # when, what

    def add(self, rank: int, process: BaseProcess, connection: Connection[Any, Any]) -> None:
        self.processes[rank] = process
        self.waiting[rank] = connection

    def collect(self, deadline: float, name: str, timeout_seconds: float, directory: Path) -> None:
        """Wait for all ranks; after the first failure only for the grace period."""
        while self.waiting and (left := deadline - time.monotonic()) > 0:
            ready = multiprocessing.connection.wait(list(self.waiting.values()), timeout=left)
            for rank in [rank for rank, conn in self.waiting.items() if conn in ready]:
                self._receive(rank)
            if self.failures:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if self.waiting and not self.failures:
            stacks = [directory / f"rank-{rank}.stack" for rank in self.waiting]
            seen = "".join(f"\n{path.stem}: {path.read_text()}" for path in stacks if path.exists())
            raise TimeoutError(
                f"`{name}` did not end within timeout_seconds={timeout_seconds} on ranks "
                f"{sorted(self.waiting)} of {len(self.processes)}; they were stopped; look for a "
                f"collective that not every rank calls{seen}"
            )

    def _receive(self, rank: int) -> None:
        connection = self.waiting.pop(rank)
        try:
            failed_at, payload, text = pickle.loads(connection.recv_bytes())  # noqa: S301 - our child
        except EOFError:
            self.processes[rank].join()
            code = self.processes[rank].exitcode
            lost = f"rank {rank} ended without an answer, exit code {code}; see its output above"
            # a death is the cause of its peers' errors, whichever is read first
            self.failures.append((-1.0, RankLostError(lost, ranks=(rank,))))
            return
        finally:
            connection.close()
        if failed_at is None:
            self.results[rank] = payload
            return
        error = pickle.loads(payload) if payload else RuntimeError(text)  # noqa: S301 - our child
        error.add_note(f"raised on rank {rank} of {len(self.processes)}:\n{text}")
        self.failures.append((failed_at, error))

    def reap(self) -> None:
        for connection in self.waiting.values():
            connection.close()
        for rank in self.waiting:
            self.processes[rank].kill()
        for process in self.processes.values():
            process.join()
            process.close()


def _rank_main(spec: _Spec, connection: Connection[Any, Any]) -> None:
    """Run one rank and leave without Python's finalization (rank)."""
    os.environ |= {
        "RANK": str(spec.rank),
        "LOCAL_RANK": str(spec.rank),
        "WORLD_SIZE": str(spec.world_size),
        "OMP_NUM_THREADS": "1",
    }
    stack = Path(spec.directory, f"rank-{spec.rank}.stack").open("w")  # noqa: SIM115 - until the end
    faulthandler.dump_traceback_later(spec.timeout_seconds * 0.9, file=stack)
    try:
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import FileStore
        from torch.distributed.distributed_c10d import PrefixStore

        torch.set_num_threads(1)
        store = FileStore(str(Path(spec.directory, "store")), spec.world_size)
        dist.init_process_group(
            "gloo",
            store=PrefixStore("run_ranks", store),
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=timedelta(seconds=spec.timeout_seconds),
        )
        answer: tuple[float | None, bytes, str] = (
            None,
            pickle.dumps(spec.target.load()(spec.rank, *spec.args)),
            "",
        )
    except BaseException as error:  # noqa: BLE001 - the border of the process: sent, not hidden
        answer = (time.monotonic(), _pickled(error), traceback.format_exc())
    connection.send_bytes(pickle.dumps(answer))
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads take the GIL while Python ends and then abort the process now and then
    # (pytorch#190489): the answer is out, so nothing is lost by leaving at once
    os._exit(0)


def _pickled(error: BaseException) -> bytes:
    # some exceptions pickle but cannot be made again; the text stands in for those
    with contextlib.suppress(Exception):
        data = pickle.dumps(error)
        pickle.loads(data)  # noqa: S301 - made on the line above
        return data
    return b""
