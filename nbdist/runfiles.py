"""The private directory of a world, and the registry of worlds of this user (anywhere).

Each world has a directory of mode 0700 with its keys, logs, endpoints and rendezvous store.
All of them lie in one directory of this user, so that `attach` and `nbdist worlds` find them.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nbdist.errors import NoWorldError, StartError
from nbdist.keeper import is_alive

__all__ = ["WorldRecord", "base_directory", "create", "write_json", "list_worlds", "find_world"]


@dataclass(slots=True, kw_only=True)
class WorldRecord:
    """What a client needs to attach to a world; stored as `world.json`.

    Attributes:
        processes: `[pid, start ticks]` of the controller and of every MPI launcher.
        controller: the controller's entry of `processes`.
        spares: those launchers' entries whose process waits for a place, by the spare's token.
        owner: `[pid, start ticks]` of the client that started the world.
        settings: what a launcher of a rank that replaces another is started with.
        memory_directory: a private directory on a memory file system; empty without one.
    """

    world_id: str
    directory: str
    num_ranks: int
    processes: list[list[float]] = field(default_factory=list)
    controller: list[float] = field(default_factory=list)
    spares: dict[str, list[float]] = field(default_factory=dict)
    owner: list[float] = field(default_factory=list)
    keep: bool = False
    started_at: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    memory_directory: str = ""

    def save(self) -> None:
        """Write the record into the world's directory."""
        write_json(Path(self.directory) / "world.json", asdict(self))

    def remove_files(self) -> None:
        """Remove everything that the world has on disk and in memory file systems."""
        for directory in (self.directory, self.memory_directory):
            if directory:
                shutil.rmtree(directory, ignore_errors=True)

    @property
    def is_alive(self) -> bool:
        """Whether the world's controller and a launcher run; one may have ended with its ranks."""
        others = [entry for entry in self.processes if entry not in self.spares.values()]
        running = [entry for entry in others if is_alive(int(entry[0]), entry[1])]
        return self.controller in running and len(running) > 1

    def refresh(self) -> None:
        """Take in the processes that another client has added."""
        path = Path(self.directory) / "world.json"
        if path.exists():
            known = json.loads(path.read_text())
            self.processes, self.spares = known["processes"], known["spares"]


def base_directory() -> Path:
    """Return this user's directory of worlds, made private.

    Raises:
        StartError: the directory belongs to someone else or is open to others.
    """
    parent = os.environ.get("NBDIST_RUN_DIR") or os.environ.get("XDG_RUNTIME_DIR") or ""
    root = Path(parent) if parent and os.access(parent, os.W_OK) else Path(tempfile.gettempdir())
    base = root / f"nbdist-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    found = base.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise StartError(
            f"run directory {base} must be private to user {os.getuid()}, but it belongs to "
            f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}; set NBDIST_RUN_DIR to a "
            "directory of your own",
            stage="prepare",
        )
    return base


def create() -> tuple[str, Path]:
    """Make a new world's directory and return its id and path."""
    world_id = secrets.token_hex(4)
    directory = base_directory() / world_id
    directory.mkdir(mode=0o700)
    for name in ("logs", "ranks", "spares", "profile"):
        (directory / name).mkdir(mode=0o700)
    return world_id, directory


def create_in_memory(world_id: str) -> str:
    """Make a world's directory on the memory file system; return an empty text without one."""
    path = Path("/dev/shm") / f"nbdist-{os.getuid()}-{world_id}"  # noqa: S108 - made private
    try:
        path.mkdir(mode=0o700)
    except OSError:
        return ""
    return str(path)


def write_json(path: Path, value: object) -> None:
    """Write JSON readable by this user only; a reader never sees half of it."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(value, file)
    staged.replace(path)


def list_worlds() -> list[WorldRecord]:
    """Return the running worlds of this user, oldest first."""
    records = []
    for path in base_directory().glob("*/world.json"):
        record = WorldRecord(**json.loads(path.read_text()))
        if record.is_alive:
            records.append(record)
    return sorted(records, key=lambda record: record.started_at)


def find_world(world_id: str | None) -> WorldRecord:
    """Return the record of a running world: the one named, or the only one.

    Raises:
        NoWorldError: there is none, or there are several and none was named.
    """
    worlds = list_worlds()
    named = [w for w in worlds if world_id is None or w.world_id == world_id]
    if len(named) == 1:
        return named[0]
    ids = ", ".join(w.world_id for w in worlds) or "none"
    if not named:
        raise NoWorldError(
            f"no running world {world_id or ''} to attach to; running worlds: {ids}; "
            "start one with `%distributed start`"
        )
    raise NoWorldError(f"{len(named)} worlds run: {ids}; name one: `%distributed attach ID`")
