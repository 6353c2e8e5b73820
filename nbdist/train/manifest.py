"""What stands in a checkpoint directory, and which directories are complete (ranks).

A checkpoint is a directory `step-00000120`. It is written under another name, its manifest last,
and renamed once: a name that `latest` finds is complete, whenever the writers were killed. One that
the run has gone back behind is set aside, as `step-00000120.aside1`, and is the user's to delete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nbdist.errors import CheckpointError

__all__ = [
    "Manifest",
    "check_digests",
    "digests",
    "latest",
    "list_checkpoints",
    "prune",
    "publish",
    "read_manifest",
    "set_aside",
    "some",
    "step_of",
    "verify",
    "write_text",
]

_MANIFEST = "manifest.json"
_SHOWN = 8  # names that an error lists before it counts the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself, in `manifest.json`.

    Attributes:
        step: optimizer steps done.
        world_size: ranks that wrote it.
        mesh: ranks on each axis.
        loss: of its last step.
        seconds: wall-clock time of the save, since 1970.
        loss_scale: factor of float16 gradients and good steps since it fell; None without one.
        config: how the run was configured.
        files: size in bytes of every other file.
        sha256: checksum of those files, by name.
    """

    step: int
    world_size: int
    mesh: dict[str, int]
    torch_version: str
    loss: float | None
    seconds: float
    loss_scale: tuple[float, int] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)


def list_checkpoints(directory: str | Path) -> list[Path]:
    """Return the complete checkpoints of a directory, the oldest step first."""
    found = [path for path in Path(directory).glob("step-*") if path.name[5:].isdigit()]
    return sorted((path for path in found if (path / _MANIFEST).is_file()), key=step_of)


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's directory."""
    return int(path.name.removeprefix("step-"))


def latest(directory: str | Path) -> Path:
    """Return the complete checkpoint with the highest step.

    Raises:
        CheckpointError: there is none; the text says what the directory holds instead.
    """
    if complete := list_checkpoints(directory):
        return complete[-1]
    if not Path(directory).is_dir():
        found = "that directory does not exist"
    else:
        partial = sorted(
            path.name for path in Path(directory).glob("step-*") if ".aside" not in path.name
        )
        found = f"only unfinished ones: {some(partial)}" if partial else "the directory is empty"
    raise CheckpointError(
        f"no complete checkpoint in {Path(directory).resolve()}: {found}; train with "
        "CheckpointConfig(directory=...) first, or name the directory of an earlier run"
    )


def read_manifest(path: str | Path) -> Manifest:
    """Return the manifest of a checkpoint after checking that its files are all there.

    Raises:
        CheckpointError: it is missing, unreadable, or a file is missing or short.
    """
    path = Path(path)
    try:
        manifest = Manifest(**json.loads((path / _MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no complete checkpoint: its {_MANIFEST} cannot be read ({error}); use "
            "a path that list_checkpoints(directory) returns"
        ) from error
    wrong = [
        f"{name} ({_size(path / name)} of {size} bytes)"
        for name, size in manifest.files.items()
        if _size(path / name) != size
    ]
    if wrong:
        raise CheckpointError(
            f"{path} is damaged: {some(wrong)}; load an earlier one from "
            "list_checkpoints(directory)"
        )
    return manifest


def verify(path: str | Path) -> Manifest:
    """Read a checkpoint whole and return its manifest; needs no ranks.

    Raises:
        CheckpointError: a file is missing, short, or differs from its checksum.
    """
    manifest = read_manifest(path)
    check_digests(Path(path), manifest, sorted(manifest.sha256))
    return manifest


def check_digests(path: Path, manifest: Manifest, names: list[str]) -> None:
    """Raise CheckpointError for files of a checkpoint that differ from their checksums."""
    try:
        found = digests(path / name for name in names)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; mend that, or load an earlier one from "
            "list_checkpoints(directory)"
        ) from error
    if wrong := [name for name in names if found[name] != manifest.sha256[name]]:
        raise CheckpointError(
            f"{path} is damaged: {some(wrong)} differs from the checksum in its {_MANIFEST}; load "
            "an earlier one from list_checkpoints(directory)"
        )


def digests(paths: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of files in hex, by name."""
    found = {}
    for path in paths:
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def publish(
    partial: Path,
    final: Path,
    manifest: Manifest,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> list[str]:
    """Add the manifest and the sizes of all files, rename, then prune; on one rank.

    Returns:
        Names of the later checkpoints that were set aside: the run has gone back behind them, and
        pruning by step would take this one for the oldest.
    """
    sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    described = asdict(manifest) | {"files": sizes}
    write_text(partial / _MANIFEST, json.dumps(described, indent=1))
    _sync_directory(partial)
    later = set_aside(final.parent, manifest.step)
    if final.exists():  # this step was saved before; a directory cannot be renamed over another
        aside = final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")
        final.rename(aside)
        partial.rename(final)
        shutil.rmtree(aside)
    else:
        partial.rename(final)
    _sync_directory(final.parent)
    if keep_last is not None:
        prune(final.parent, keep_last, keep_every)
    return later


def set_aside(directory: Path, after_step: int) -> list[str]:
    """Rename the checkpoints of later steps, so that they are neither loaded nor pruned.

    On one rank.

    Returns:
        Their new names. `Trainer.load` takes these; renamed back they are found again.
    """
    names = []
    for path in list_checkpoints(directory):
        if step_of(path) > after_step:
            number = 1
            while (aside := path.with_name(f"{path.name}.aside{number}")).exists():
                number += 1
            names.append(path.rename(aside).name)
    return names


def prune(directory: Path, keep_last: int, keep_every: int | None = None) -> None:
    """Delete all but the newest checkpoints, and what killed saves have left; on one rank.

    Those whose step is a multiple of `keep_every` stay too.
    """
    for leftover in directory.glob("step-*.tmp-*"):
        shutil.rmtree(leftover)
    for old in list_checkpoints(directory)[:-keep_last]:
        if keep_every is not None and step_of(old) % keep_every == 0:
            continue
        # renamed first: a kill during the deletion must not leave a complete-looking name
        shutil.rmtree(old.rename(old.with_name(f"{old.name}.tmp-old")))


def write_text(path: Path, text: str) -> None:
    """Write a file through to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def some(names: list[str]) -> str:
    """Return at most eight names, and the number of the others."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
