"""Checkpoints: written whole or not at all, loaded by any number of ranks (ranks).

`manifest` tells how a checkpoint becomes complete, `snapshot` what goes into one.
"""

from __future__ import annotations

import json
import re
import uuid
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from nbdist.errors import CheckpointError
from nbdist.train.manifest import (
    Manifest,
    check_digests,
    digests,
    latest,
    list_checkpoints,
    publish,
    read_manifest,
    some,
    write_text,
)
from nbdist.train.snapshot import Snapshot, take

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = [
    "Manifest",
    "Snapshot",
    "latest",
    "list_checkpoints",
    "load",
    "read_rng",
    "take",
    "write",
]

_TOKENIZER = "tokenizer.json"


def write(snapshot: Snapshot, group: dist.ProcessGroup | None = None) -> Path:
    """Write one checkpoint and return its path. Collective over: `group`, of all ranks.

    Raises:
        CheckpointError: a rank could not write; the checkpoints before it are untouched.
    """
    final, rank = snapshot.final, dist.get_rank()
    names = [f"{final.name}.tmp-{uuid.uuid4().hex[:8]}"]
    dist.broadcast_object_list(names, src=0, group=group)
    partial = final.with_name(names[0])
    what = f"checkpoint of step {snapshot.manifest.step} was not saved to {final}"
    with _together(what, group):
        partial.mkdir(parents=True, exist_ok=True)
    with _together(what, group):
        state_dict_saver.save(snapshot.state, checkpoint_id=partial, process_group=group)
        write_text(partial / f"rng-{rank}.json", json.dumps(snapshot.rng))
        if rank == 0 and snapshot.tokenizer_json is not None:
            write_text(partial / _TOKENIZER, snapshot.tokenizer_json)
    sums: dict[str, str] = {}
    with _together(what, group):
        sums = digests(path for path in partial.iterdir() if _writer_of(path.name) == rank)
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, sums, group=group)
    later: list[str] = []
    with _together(what, group):
        if rank == 0:
            later = publish(
                partial,
                final,
                replace(snapshot.manifest, sha256={k: v for d in everyone for k, v in d.items()}),
                keep_last=snapshot.keep_last,
                keep_every=snapshot.keep_every,
            )
    if later:
        warnings.warn(
            f"{final} is behind {some(later)}, which were set aside: the run has gone back, and "
            "they would be taken for newer; delete them, or rename them back",
            RuntimeWarning,
            stacklevel=2,
        )
    return final


def load(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Manifest:
    """Load a checkpoint into a model, exactly. Collective over: the default group, if there is one.

    The model may be sharded over another number of ranks than wrote it, or be whole, in a
    process without a group.

    Args:
        path: a directory that `save`, `latest` or `list_checkpoints` returned.
        model: gets the weights in place.
        optimizer: gets its state, if given.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, damaged, or of another model.
    """
    path = Path(path)
    manifest = read_manifest(path)
    _verify_together(path, manifest)
    weights = get_model_state_dict(model)
    state: dict[str, Any] = {"model": weights}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    reader = FileSystemReader(path)
    _check_same_tensors(path, _shapes_of_all_ranks(weights), reader.read_metadata())
    try:
        with warnings.catch_warnings():
            # loading without a group is what such a caller wants
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # in place: each rank reads its own shards, whatever the shards on disk
            state_dict_loader.load(state, storage_reader=reader)
    except CheckpointException as error:
        raise CheckpointError(
            f"{path} could not be loaded: {error}; if the optimizer changed, load the weights "
            "alone: load(path, model)"
        ) from error
    set_model_state_dict(model, weights)
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return manifest


def read_rng(path: str | Path, rank: int) -> dict[str, Any]:
    """Return the random state that a rank saved, for `restore_rng`."""
    state: dict[str, Any] = json.loads(Path(path, f"rng-{rank}.json").read_text(encoding="utf-8"))
    return state


def _shapes_of_all_ranks(weights: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    mine = {name: tuple(getattr(value, "shape", ())) for name, value in weights.items()}
    if not dist.is_initialized():
        return mine
    everyone: list[dict[str, tuple[int, ...]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: shape for theirs in everyone for name, shape in theirs.items()}


def _check_same_tensors(path: Path, wanted: dict[str, tuple[int, ...]], metadata: Metadata) -> None:
    saved = {
        name.removeprefix("model."): tuple(getattr(entry, "size", ()))
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("model.")
    }
    differing = [
        f"`{name}` (checkpoint {saved.get(name, 'none')}, model {wanted.get(name, 'none')})"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if differing:
        raise CheckpointError(
            f"{path} holds another model: {len(differing)} tensors differ: {some(differing)}; "
            "build the model with the configuration in its manifest.json"
        )


def _writer_of(name: str) -> int:
    """Return the rank that has written a file: `__1_0.distcp` and `rng-1.json` are of rank 1."""
    found = re.match(r"__(\d+)_\d+\.distcp$|rng-(\d+)\.json$", name)
    return int(found[1] or found[2]) if found else 0


def _verify_together(path: Path, manifest: Manifest) -> None:
    """Raise CheckpointError on all ranks when a file's checksum is wrong; each reads its part."""
    if not dist.is_initialized():
        check_digests(path, manifest, sorted(manifest.sha256))
        return
    problem = None
    try:
        mine = sorted(manifest.sha256)[dist.get_rank() :: dist.get_world_size()]
        check_digests(path, manifest, mine)
    except CheckpointError as error:
        problem = error
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, str(problem) if problem else "")
    if found := [text for text in problems if text]:
        raise CheckpointError(found[0]) from problem


@contextmanager
def _together(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """End a part of a save on all ranks alike: one rank's failure is every rank's error."""
    problem: BaseException | None = None
    try:
        yield
    except (OSError, CheckpointException) as error:
        problem = error
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, _in_words(problem), group=group)
    failed = {rank: text for rank, text in enumerate(problems) if text}
    if failed:
        rank, text = next(iter(failed.items()))
        raise CheckpointError(
            f"{what}: rank {rank} met {text} ({len(failed)} of {len(problems)} ranks failed); "
            "free or mend that place and save again"
        ) from problem


def _in_words(problem: BaseException | None) -> str:
    """Return the cause that a user can mend: torch wraps it in a traceback of every rank."""
    if isinstance(problem, CheckpointException) and problem.failures:
        problem = next(iter(problem.failures.values()))[0]
    return f"{type(problem).__name__}: {problem}" if problem else ""
