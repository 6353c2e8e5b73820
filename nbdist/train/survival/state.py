"""What only this rank has of a run, as one flat buffer in host memory (ranks)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from nbdist.train.survival.boxes import Box, box_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nbdist.train.survival.boxes import Key

__all__ = ["Entry", "Layout", "Slot", "layout_of", "optimized", "restore"]

_Kind = Literal["parameter", "buffer", "optimizer"]

_ALIGN = 16
_NUM_NOTES = 6
_HEADER = 8 * (2 + _NUM_NOTES)  # step, digest, notes
_TORCH_BYTES, _CUDA_BYTES = 5056, 16
_WORDS = 624  # of a Mersenne twister
_NUMPY_BYTES = _WORDS * 4 + 3 * 8
_PYTHON_BYTES = (_WORDS + 1) * 4 + 2 * 8
_RNG_BYTES = _TORCH_BYTES + _CUDA_BYTES + _NUMPY_BYTES + _PYTHON_BYTES
DATA_AT = math.ceil((_HEADER + _RNG_BYTES) / _ALIGN) * _ALIGN
"""Bytes of a slot before the tensors: step, digest, notes and random states."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a rank: its own part, where the whole is cut over ranks.

    Attributes:
        kind: whose tensor it is.
        index: of the weight or buffer, in the model's order; the optimizer's order for its own.
        key: name of an optimizer's state; empty for others.
        is_cut: the tensor is a part of a DTensor.
        on_device: it lies where the weights lie; an optimizer may count its steps on the host.
    """

    kind: _Kind
    index: int
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_cut: bool
    on_device: bool

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class Layout:
    """Which tensors a rank has, in order, and the values of its optimizer that are no tensors.

    Attributes:
        stage: of the pipeline, among whose weights the indices count.
        boxes: which part of the whole each tensor is; empty until `locate`.
    """

    entries: list[Entry] = field(default_factory=list)
    plain: dict[tuple[int, str], Any] = field(default_factory=dict)
    stage: int = field(default=0, compare=False)
    boxes: list[Box] = field(default_factory=list, compare=False)

    @property
    def offsets(self) -> list[int]:
        """Where each tensor begins in a slot, and where the last one ends."""
        places = [DATA_AT]
        for entry in self.entries:
            places.append(places[-1] + math.ceil(entry.num_bytes / _ALIGN) * _ALIGN)
        return places

    @property
    def has_optimizer_state(self) -> bool:
        """Whether the optimizer has taken a step: its state is made then."""
        return any(entry.kind == "optimizer" for entry in self.entries)

    def locate(self, model: nn.Module, optimizer: torch.optim.Optimizer, stage: int) -> None:
        """Note which part of the whole every tensor is: too slow to be done in each step."""
        self.stage = stage
        weights = {
            "parameter": [box_of(one) for one in model.parameters()],
            "buffer": [box_of(one) for one in model.buffers()],
            "optimizer": [box_of(one) for one in optimized(optimizer)],
        }
        self.boxes = [
            weights[entry.kind][entry.index]
            if entry.is_cut
            else Box((0,) * len(entry.shape), entry.shape)
            for entry in self.entries
        ]

    def keys(self) -> list[Key]:
        """Return the name of every tensor."""
        return [(self.stage, one.kind, one.index, one.key) for one in self.entries]


def layout_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Layout, list[Tensor]]:
    """Return what this rank has, and the tensors themselves in that order. Not collective."""
    layout, tensors = Layout(), []

    def add(kind: _Kind, index: int, key: str, whole: Tensor) -> None:
        local = _local(whole)
        is_cut = isinstance(whole, DTensor)
        entry = Entry(kind, index, key, tuple(local.shape), local.dtype, is_cut, local.is_cuda)
        layout.entries.append(entry)
        tensors.append(local)

    for index, parameter in enumerate(model.parameters()):
        add("parameter", index, "", parameter)
    for index, buffer in enumerate(model.buffers()):
        add("buffer", index, "", buffer)
    for index, weight in enumerate(optimized(optimizer)):
        for key, value in sorted(optimizer.state.get(weight, {}).items()):
            if isinstance(value, torch.Tensor):
                add("optimizer", index, key, value)
            else:
                layout.plain[index, key] = value
    return layout, tensors


class Slot:
    """The state of one rank after one step, in host memory.

    Args:
        layout: of the tensors; random states alone when None.
        pinned: let a GPU copy into it directly.

    Attributes:
        is_valid: the slot holds a whole state.
    """

    def __init__(self, layout: Layout | None, *, pinned: bool = False) -> None:
        self.layout = layout or Layout()
        num_bytes = self.layout.offsets[-1]
        # zeroed: the gaps between tensors count in the digest
        self.flat = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.is_valid = False
        self._header = self.flat[:16].view(torch.int64)
        self.notes = self.flat[16:_HEADER].view(torch.float64)
        """Six numbers of the trainer."""

    @property
    def step(self) -> int | None:
        """The step after which the state was taken; None when the slot holds none."""
        return int(self._header[0]) if self.is_valid else None

    @property
    def digest(self) -> int:
        """Of the tensors, as they were when they were copied."""
        return int(self._header[1])

    def fill(self, step: int, tensors: list[Tensor], notes: list[float]) -> None:
        """Copy tensors and the process's random states; waits for the device."""
        self.is_valid = False
        for view, tensor in zip(self.views(), tensors, strict=True):
            view.copy_(tensor.detach(), non_blocking=True)
        if any(entry.on_device for entry in self.layout.entries):
            torch.cuda.current_stream().synchronize()
        _pack_rng(self.flat[_HEADER : _HEADER + _RNG_BYTES])
        self.notes[: len(notes)] = torch.tensor(notes, dtype=torch.float64)
        self.seal(step)

    def seal(self, step: int) -> None:
        """Say that the slot holds the state after a step."""
        self._header[0] = step
        self._header[1] = self.compute_digest()
        self.is_valid = True

    def views(self) -> list[Tensor]:
        """Return the tensors of the slot."""
        return [
            self.flat[at : at + entry.num_bytes].view(entry.dtype).view(entry.shape)
            for at, entry in zip(self.layout.offsets, self.layout.entries, strict=False)
        ]

    def compute_digest(self) -> int:
        """Return a sum over all bits of the tensors: one flipped bit always changes it."""
        return int(self.flat[DATA_AT:].view(torch.int64).sum())

    def restore_rng(self) -> None:
        """Set the process's random states to those of the slot."""
        _unpack_rng(self.flat[_HEADER : _HEADER + _RNG_BYTES])


@torch.no_grad()
def restore(slot: Slot, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put a slot's tensors into a model and a new optimizer of the same place. Not collective."""
    parameters, buffers = list(model.parameters()), list(model.buffers())
    weights = optimized(optimizer)
    for entry, view in zip(slot.layout.entries, slot.views(), strict=True):
        if entry.kind == "parameter":
            _local(parameters[entry.index]).copy_(view)
        elif entry.kind == "buffer":
            _local(buffers[entry.index]).copy_(view)
        else:
            weight = weights[entry.index]
            optimizer.state[weight][entry.key] = _like(weight, view.clone(), entry)
    for (index, key), value in slot.layout.plain.items():
        optimizer.state[weights[index]][key] = value


def _like(weight: Tensor, value: Tensor, entry: Entry) -> Tensor:
    """Return a value cut over ranks as the weight that it belongs to."""
    value = value.to(_local(weight).device) if entry.on_device else value
    if not entry.is_cut:
        return value
    assert isinstance(weight, DTensor), "the state of a cut weight only is cut"
    return DTensor.from_local(
        value,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def optimized(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the weights of an optimizer, in its order."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _pack_rng(room: Tensor) -> None:
    """Write the states of torch's, the GPU's, numpy's (legacy) and Python's generators."""
    _, words, place, has_gauss, cached = np.random.get_state(legacy=True)
    _, python_words, next_gauss = random.getstate()
    cuda = torch.zeros(_CUDA_BYTES, dtype=torch.uint8)
    if torch.cuda.is_available():
        cuda.copy_(torch.cuda.get_rng_state())
    gauss = (float(next_gauss is not None), next_gauss or 0.0)
    parts = (
        torch.get_rng_state(),
        cuda,
        _bytes(np.asarray(words, dtype=np.uint32)),
        _bytes(np.array([place, has_gauss, cached], dtype=np.float64)),
        _bytes(np.array(python_words, dtype=np.uint32)),
        _bytes(np.array(gauss, dtype=np.float64)),
    )
    room.copy_(torch.cat(parts))


def _unpack_rng(room: Tensor) -> None:
    sizes = [_TORCH_BYTES, _CUDA_BYTES, _WORDS * 4, 24, (_WORDS + 1) * 4, 16]
    state, cuda, words, rest, python_words, gauss = torch.split(room.clone(), sizes)
    torch.set_rng_state(state)
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    place, has_gauss, cached = rest.numpy().view(np.float64).tolist()
    keys = words.numpy().view(np.uint32)
    np.random.set_state(("MT19937", keys, int(place), int(has_gauss), cached))
    has_next, next_gauss = gauss.numpy().view(np.float64).tolist()
    known = tuple(int(word) for word in python_words.numpy().view(np.uint32))
    random.setstate((3, known, next_gauss if has_next else None))


def _bytes(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.view(np.uint8))
