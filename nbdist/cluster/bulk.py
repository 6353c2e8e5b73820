"""Directories for the large data of one push or pull, gone when it has ended (client)."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from nbdist.messages import RankInfo
from nbdist.runfiles import WorldRecord

__all__ = ["is_on_one_host", "transfer_directories"]


def is_on_one_host(infos: list[RankInfo]) -> bool:
    """Return whether all ranks run on this client's host, so that files reach them."""
    return {info.host for info in infos} == {socket.gethostname()}


@contextlib.contextmanager
def transfer_directories(record: WorldRecord) -> Iterator[list[str]]:
    """Make private directories for one transfer: in memory if there is one, then on disk."""
    name = f"transfer-{secrets.token_hex(4)}"
    homes = [home for home in (record.memory_directory, record.directory) if home]
    made = []
    try:
        for home in homes:
            path = Path(home) / name
            path.mkdir(mode=0o700)
            made.append(str(path))
        yield made
    finally:
        for directory in made:
            shutil.rmtree(directory, ignore_errors=True)
