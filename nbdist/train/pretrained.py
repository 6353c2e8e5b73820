"""Weights of a Hugging Face directory into a sharded model: a rank reads its slices (ranks)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nbdist.errors import CheckpointError
from nbdist.train.empty import give_memory, is_empty
from nbdist.train.llama import llama_name
from nbdist.train.manifest import some
from nbdist.train.models import DecoderLM
from nbdist.train.parallelize import bare

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["load_pretrained"]


def load_pretrained(model: nn.Module, directory: str | Path) -> None:
    """Fill a model from the safetensors of a Hugging Face directory; not collective.

    Each rank reads only the slices of its own shards. The model is a `DecoderLM`, filled from a
    Llama of the same sizes, or one of transformers, with its names. Call it on every rank, after
    `parallelize`; a directory that all ranks see.

    Args:
        model: whole or sharded; changed in place, in its own dtype. One that was built inside
            `empty_weights()` gets memory for this rank's shards first: no rank ever holds it whole.
        directory: with model.safetensors, or its parts and their index.

    Raises:
        CheckpointError: a weight is missing or has another shape; nothing was changed then.
    """
    directory = Path(directory)
    files = _files(directory)
    decoder = isinstance(bare(model), DecoderLM)
    wanted: dict[int, tuple[list[str], Tensor]] = {}
    for name, parameter in bare(model).named_parameters(remove_duplicate=False):
        outside = llama_name(name) if decoder else name
        # tied weights are one parameter of several names, of which the files hold at least one
        wanted.setdefault(id(parameter), ([], parameter))[0].append(outside)
    places = _check(directory, files, list(wanted.values()))
    if is_empty(model):
        # By name: the weights become new objects.
        named = [(name, _names_of(bare(model), weight)) for name, weight in places]
        give_memory(bare(model), _device_of(places))
        now = dict(bare(model).named_parameters(remove_duplicate=False))
        places = [(name, now[inside]) for name, inside in named]
    by_file: dict[Path, list[tuple[str, Tensor]]] = {}
    for name, weight in places:
        by_file.setdefault(files[name], []).append((name, weight))
    for file, weights in by_file.items():
        with safe_open(file, framework="pt") as opened, torch.no_grad():
            for name, weight in weights:
                _fill(weight, opened.get_slice(name))


def _names_of(model: nn.Module, weight: Tensor) -> str:
    return next(name for name, one in model.named_parameters() if one is weight)


def _device_of(places: list[tuple[str, Tensor]]) -> torch.device:
    kinds = {w.device_mesh.device_type for _, w in places if isinstance(w, DTensor)}
    return torch.device(next(iter(kinds), "cpu"))


def _files(directory: Path) -> dict[str, Path]:
    """Return the file of each weight."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    try:
        if index.is_file():
            placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: directory / file for name, file in placed.items()}
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"no weights could be read from {directory}: {error}; name a directory with "
            "model.safetensors, or with its parts and model.safetensors.index.json"
        ) from error


def _check(
    directory: Path, files: dict[str, Path], wanted: list[tuple[list[str], Tensor]]
) -> list[tuple[str, Tensor]]:
    """Return the name to read for each parameter."""
    found, wrong = [], []
    for names, parameter in wanted:
        name = next((name for name in names if name in files), None)
        if name is None:
            wrong.append(f"`{names[0]}` (missing)")
            continue
        with safe_open(files[name], framework="pt") as opened:
            shape = tuple(opened.get_slice(name).get_shape())
        if shape != tuple(parameter.shape):
            wrong.append(f"`{name}` (file {shape}, model {tuple(parameter.shape)})")
        found.append((name, parameter))
    if wrong:
        raise CheckpointError(
            f"{directory} holds another model: {len(wrong)} weights differ: {some(wrong)}; build "
            "the model with the sizes in its config.json"
        )
    return found


def _fill(parameter: Tensor, stored: Any) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(stored[:])
        return
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if 0 in shape:  # uneven: this rank holds nothing of it
        return
    box = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    parameter.to_local().copy_(stored[box])
