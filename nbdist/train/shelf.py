"""What `%distributed checkpoints` does on a rank: list, verify, restore, export (ranks)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.errors import CheckpointError
from nbdist.train.beginning import checkpoint_config, leave_later
from nbdist.train.export import export
from nbdist.train.manifest import (
    latest,
    list_checkpoints,
    read_manifest,
    some,
    step_of,
    verify,
    write_text,
)
from nbdist.train.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["export_step", "find_trainer", "restore_step", "table", "verify_steps"]

_VERIFIED = "verified.json"  # beside the files of the manifest, which it does not change
_HEADINGS = ("step", "when", "size", "loss", "mesh", "verified")


def table(names: Mapping[str, Any], directory: str | None) -> str:
    """Return the complete checkpoints as lines of text; not collective.

    Args:
        names: where to look for the trainer whose directory is meant.
        directory: the directory instead.

    Raises:
        CheckpointError: no trainer, or none that saves.
    """
    where = _directory(names, directory)
    found = list_checkpoints(where)
    if not found:
        return f"no complete checkpoint in {where}"
    rows = [_HEADINGS, *map(_row, found)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(_HEADINGS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([f"checkpoints in {where}", *lines])


def verify_steps(names: Mapping[str, Any], directory: str | None, step: int | None) -> str:
    """Read a checkpoint whole, all of them without a step, and note when; not collective.

    Raises:
        CheckpointError: names the damaged ones.
    """
    where = _directory(names, directory)
    paths = list_checkpoints(where) if step is None else [_path(where, step)]
    problems = []
    for path in paths:
        try:
            verify(path)
        except CheckpointError as error:
            (path / _VERIFIED).unlink(missing_ok=True)
            problems.append(str(error))
            continue
        write_text(path / _VERIFIED, json.dumps({"seconds": time.time()}))
    if problems:
        raise CheckpointError("\n".join(problems))
    return f"{len(paths)} verified: every file equals its checksum\n{table(names, directory)}"


def restore_step(names: Mapping[str, Any], directory: str | None, step: int) -> str:
    """Make the trainer go on from a step. Collective over: the default group.

    Later checkpoints of its run are set aside, see `leave_later`.

    Raises:
        CheckpointError: there is no such step, no trainer, or the checkpoint does not fit.
    """
    trainer = find_trainer(names)
    trainer.finish_saving()
    path = _path(_directory(names, directory), step)
    trainer.load(path)
    own = checkpoint_config(trainer.config)
    told = leave_later(own, step) if path.parent == Path(own.directory) else ""
    text = f"the trainer is at step {trainer.step}, from {path}; fit() goes on from there"
    return f"{text}; {told}" if told else text


def export_step(
    names: Mapping[str, Any], directory: str | None, step: int | None, target: str
) -> str:
    """Write a checkpoint's weights, the newest without a step, for transformers; not collective.

    Raises:
        CheckpointError: see `nbdist.train.export`.
    """
    where = _directory(names, directory)
    path = latest(where) if step is None else _path(where, step)
    files = export(path, target)
    return f"{path} is exported to {Path(target).resolve()}: {some(files)}"


def find_trainer(names: Mapping[str, Any]) -> Trainer:
    """Return the only trainer among names.

    Raises:
        CheckpointError: there is none, or several.
    """
    found = {id(value): (name, value) for name, value in names.items()
             if isinstance(value, Trainer) and not name.startswith("_")}  # fmt: skip
    if len(found) == 1:
        return next(iter(found.values()))[1]
    held = some(sorted(name for name, _ in found.values())) or "none"
    raise CheckpointError(
        f"one trainer is wanted on each rank, and {held} was found; keep one, "
        "`trainer = Trainer(...)` in a %%distributed cell, `del` the others; `--dir DIRECTORY` "
        "lists, verifies and exports without one"
    )


def _directory(names: Mapping[str, Any], directory: str | None) -> Path:
    if directory is not None:
        return Path(directory)
    try:
        return Path(checkpoint_config(find_trainer(names).config).directory)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _path(where: Path, step: int) -> Path:
    found = {step_of(path): path for path in list_checkpoints(where)}
    if step not in found:
        raise CheckpointError(
            f"step {step} was asked for, but {where} holds the steps "
            f"{some(list(map(str, found))) or 'none'}; name one of these"
        )
    return found[step]


def _row(path: Path) -> tuple[str, ...]:
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return str(step_of(path)), "", "", "", "", f"damaged: {error}"
    degrees = [f"{axis}={degree}" for axis, degree in manifest.mesh.items() if degree > 1]
    return (
        str(manifest.step),
        _when(manifest.seconds),
        f"{sum(manifest.files.values()) / 2**20:.1f} MiB",
        "" if manifest.loss is None else f"{manifest.loss:.4f}",
        " ".join(degrees) or "one rank",
        _verified(path),
    )


def _verified(path: Path) -> str:
    note = path / _VERIFIED
    if not note.is_file():
        return "sizes only"
    return _when(json.loads(note.read_text(encoding="utf-8"))["seconds"])


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
