"""A checkpoint as a directory that transformers loads (one process, no ranks needed)."""

from __future__ import annotations

import json
import uuid
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nbdist.errors import CheckpointError
from nbdist.train.llama import llama_config, llama_name
from nbdist.train.manifest import Manifest, verify, write_text
from nbdist.train.models import DecoderConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["export"]

_INDEX = "model.safetensors.index.json"
_Entries = dict[str, TensorStorageMetadata]


def export(path: str | Path, target: str | Path, *, file_bytes: int = 2**31) -> list[str]:
    """Write the weights of a checkpoint as safetensors, with config.json and the tokenizer.

    A `DecoderLM` becomes a Llama, which computes the same; a transformers model keeps its names.
    Tied weights are written once. At most one file's weights are in memory.

    Args:
        path: the checkpoint, whatever its mesh was.
        target: made; must not exist.
        file_bytes: most bytes of a file, unless one weight has more.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: the checkpoint is damaged, or its model is neither of these two, or
            `target` is there already.
    """
    path, target = Path(path), Path(target)
    if target.exists():
        raise CheckpointError(
            f"{path} was to be exported to {target}, which exists; name a new directory"
        )
    manifest = verify(path)
    config, entries = _names(path, manifest, _weights(path))
    partial = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    parts = list(_parts(entries, file_bytes))
    placed = {}
    total = 0
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        file = "model.safetensors" if len(parts) == 1 else name
        tensors = _read(path, part)
        total += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, partial / file, metadata={"format": "pt"})
        placed.update(dict.fromkeys(tensors, file))
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        write_text(partial / _INDEX, json.dumps(index, indent=1))
    write_text(partial / "config.json", json.dumps(config, indent=1))
    _write_tokenizer(path, partial)
    partial.rename(target)
    return sorted(file.name for file in target.iterdir())


def _weights(path: Path) -> _Entries:
    return {
        name.removeprefix("model."): entry
        for name, entry in FileSystemReader(path).read_metadata().state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }


def _names(
    path: Path, manifest: Manifest, weights: _Entries
) -> tuple[dict[str, Any], dict[str, tuple[str, TensorStorageMetadata]]]:
    """Return config.json, and by the outside's name: the checkpoint's name and its shape."""
    if "transformers" in manifest.config:
        config = manifest.config["transformers"]
        tied = _tied(config)
        return config, {name: (name, e) for name, e in weights.items() if name not in tied}
    if "model" not in manifest.config:
        raise CheckpointError(
            f"{path} holds a model that is neither DecoderLM nor of transformers, so no "
            "config.json describes it; load(path, model) reads it into a whole model"
        )
    decoder = DecoderConfig(**manifest.config["model"])
    return llama_config(decoder), {llama_name(name): (name, e) for name, e in weights.items()}


def _tied(config: dict[str, Any]) -> set[str]:
    """Return the names whose weight has another name too, which transformers ties when loading."""
    from transformers import AutoConfig, AutoModelForCausalLM  # an extra

    settings = {k: v for k, v in config.items() if k != "model_type"}
    described = AutoConfig.for_model(config["model_type"], **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described)
    seen: set[int] = set()
    tied = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            tied.add(name)
        seen.add(id(parameter))
    return tied


def _parts(
    entries: dict[str, tuple[str, TensorStorageMetadata]], file_bytes: int
) -> Iterator[dict[str, tuple[str, TensorStorageMetadata]]]:
    part: dict[str, tuple[str, TensorStorageMetadata]] = {}
    size = 0
    for name, (saved, entry) in entries.items():
        needed = entry.size.numel() * entry.properties.dtype.itemsize
        if part and size + needed > file_bytes:
            yield part
            part, size = {}, 0
        part[name] = saved, entry
        size += needed
    yield part


def _read(
    path: Path, part: dict[str, tuple[str, TensorStorageMetadata]]
) -> dict[str, torch.Tensor]:
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, (_, entry) in part.items()
    }
    state = {"model": {saved: tensors[name] for name, (saved, _) in part.items()}}
    with warnings.catch_warnings():
        # without a group is what is wanted: one process reads
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state_dict_loader.load(state, storage_reader=FileSystemReader(path), no_dist=True)
    return tensors


def _write_tokenizer(path: Path, target: Path) -> None:
    saved = path / "tokenizer.json"
    if saved.is_file():
        write_text(target / saved.name, saved.read_text(encoding="utf-8"))
        described = {"tokenizer_class": "PreTrainedTokenizerFast"}
        write_text(target / "tokenizer_config.json", json.dumps(described))
