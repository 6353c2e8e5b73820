"""Carries objects to a new rank: what every rank builds itself goes by its name (ranks)."""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import cloudpickle  # type: ignore[import-untyped]
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = ["NAMESPACE", "Surroundings", "pack", "unpack", "why_not_packed"]

NAMESPACE = "namespace"
"""Name, among those known, of the dictionary that cells run in."""

_BOUND = (ProcessGroup, DeviceMesh, DTensor)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a process looks for files and modules.

    Attributes:
        directory: the current one.
        path: of imports.
    """

    directory: str
    path: tuple[str, ...]

    @classmethod
    def here(cls) -> Surroundings:
        """Return those of this process."""
        return cls(str(Path.cwd()), tuple(sys.path))

    def enter(self) -> None:
        """Give them to this process, as far as they exist on its host."""
        sys.path[:] = [*self.path, *(place for place in sys.path if place not in self.path)]
        if Path(self.directory).is_dir():
            os.chdir(self.directory)


def pack(value: Any, known: dict[str, Any]) -> bytes:
    """Return a value as bytes; objects of `known` stand by their name.

    Raises:
        Exception: whatever an object raises that cannot be packed.
    """
    room = io.BytesIO()
    _Packer(room, known).dump(value)
    return room.getvalue()


def unpack(data: bytes, known: dict[str, Any]) -> Any:
    """Return what `pack` was given on another rank of this world."""
    return _Unpacker(io.BytesIO(data), known).load()


def why_not_packed(value: Any, known: dict[str, Any]) -> str:
    """Return why a value cannot be packed, in words; empty when it can."""
    try:
        _Packer(_Sink(), known).dump(value)
    except Exception as error:  # noqa: BLE001 - whatever a user's object raises when it is packed
        return f"{type(error).__name__}: {error}"
    return ""


class _Sink(io.RawIOBase):
    def write(self, data: Any, /) -> int:
        return memoryview(data).nbytes


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, room: IO[bytes] | io.RawIOBase, known: dict[str, Any]) -> None:
        super().__init__(room)
        self._names = {id(value): name for name, value in known.items()}
        self._namespace = known.get(NAMESPACE)
        if self._namespace is not None:
            # A function of a cell looks its names up in the namespace of the rank that calls it.
            self.globals_ref[id(self._namespace)] = self._namespace

    def persistent_id(self, value: Any) -> str | None:
        if (name := self._names.get(id(value))) is not None:
            return name
        if isinstance(value, _BOUND):
            raise pickle.PicklingError(f"a {type(value).__name__} belongs to its rank")
        return None

    def reducer_override(self, value: Any) -> Any:
        reduced = super().reducer_override(value)
        is_packed = isinstance(value, types.FunctionType) and isinstance(reduced, tuple)
        if is_packed and value.__globals__ is self._namespace:
            reduced[2][1]["__globals__"] = {}  # of cloudpickle's state of a function
        return reduced


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, known: dict[str, Any]) -> None:
        super().__init__(data)
        self._known = known

    def persistent_load(self, name: Any) -> Any:
        return self._known[name]
