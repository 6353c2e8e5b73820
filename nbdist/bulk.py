"""Values with large tensors or arrays as a small pickle and one file of their data (anywhere).

The data of large tensors and arrays, wherever they hang in a value, goes into a file once and
is read from it by every receiver into memory of its own. All the rest is a cloudpickle stream,
which travels through ipyparallel like any other call.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from nbdist.errors import NbdistError

__all__ = ["LARGE_BYTES", "pack", "unpack", "set_names", "pack_name"]

LARGE_BYTES = 1 << 16  # a model is many tensors of this size
SPARE_BYTES = 64 << 20  # left free on a memory file system
MAX_CALL_BYTES = 1 << 30  # Linux moves at most 2 GiB in a call


def pack(value: Any, directories: Sequence[str], file_name: str) -> tuple[bytes, str]:
    """Return a stream of a value and the path of the file with its large data, if there is any.

    Args:
        value: anything that cloudpickle can carry.
        directories: where the file may lie; the first with room is taken.
        file_name: of the file; it must not exist.

    Raises:
        NbdistError: no directory has room.
    """
    stream = io.BytesIO()
    packer = _Packer(stream)
    packer.dump(value)
    path = _write(packer.buffers, directories, file_name) if packer.buffers else ""
    return stream.getvalue(), path


def unpack(stream: bytes, path: str, *, on_rank: bool) -> Any:
    """Return the value that was packed; all of it is writable and shares nothing.

    Args:
        stream: from `pack`.
        path: from `pack`; empty when there is no large data.
        on_rank: put tensors of a GPU on this rank's own GPU; else they stay in host memory.
    """
    if not path:
        return _Unpacker(io.BytesIO(stream), -1, on_rank).load()
    with Path(path).open("rb", buffering=0) as file:
        return _Unpacker(io.BytesIO(stream), file.fileno(), on_rank).load()


def set_names(stream: bytes, path: str) -> None:
    """Set the names of a packed dictionary in this rank's namespace."""
    _user_names().update(unpack(bytes(stream), path, on_rank=True))


def pack_name(name: str, directories: Sequence[str], file_prefix: str) -> tuple[bytes, str]:
    """Pack what a name of this rank, which may be dotted, stands for."""
    first, *rest = name.split(".")
    names = _user_names()
    if first not in names:
        raise NameError(
            f"name {first!r} is not defined on rank {names.get('rank')}; "
            "`%distributed who` lists what is"
        )
    value = names[first]
    for attribute in rest:
        value = getattr(value, attribute)
    return pack(value, directories, f"{file_prefix}-{os.getpid()}")


def _user_names() -> dict[str, Any]:
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    assert shell is not None, "a rank has a shell"
    names: dict[str, Any] = shell.user_ns
    return names


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes large tensors and arrays out of the stream.

    Attributes:
        buffers: their data, in the order of the file.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.buffers: list[memoryview] = []
        self._offset = 0
        self._seen: dict[int, tuple[Any, tuple[Any, ...]]] = {}
        # Who passes a tensor has imported torch: nbdist need not.
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        self._tensor = getattr(torch, "Tensor", None)
        self._array = getattr(numpy, "ndarray", None)

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        """Return where the data of a large tensor or array lies; None leaves it in the stream."""
        kind = type(value)
        if kind is not self._tensor and kind is not self._array:
            return None
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        found = _tensor_part(value) if kind is self._tensor else _array_part(value)
        if found is None:
            return None
        data, facts = found
        place = (len(self.buffers), self._offset, *facts)
        self.buffers.append(data)
        self._offset += data.nbytes
        self._seen[id(value)] = (value, place)
        return place


def _tensor_part(tensor: Any) -> tuple[memoryview, tuple[Any, ...]] | None:
    """Return data and facts of a tensor that goes into the file."""
    torch = sys.modules["torch"]
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized and not vars(tensor)
    on_gpu = tensor.device.type == "cuda"
    if not is_plain or not (on_gpu or tensor.device.type == "cpu"):
        return None
    if tensor.numel() * tensor.element_size() < (1 if on_gpu else LARGE_BYTES):
        return None
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    dtype = str(tensor.dtype).removeprefix("torch.")
    facts = ("tensor", dtype, tuple(tensor.shape), (on_gpu, tensor.requires_grad))
    return memoryview(flat.view(torch.uint8).numpy()), facts


def _array_part(array: Any) -> tuple[memoryview, tuple[Any, ...]] | None:
    """Return data and facts of an array that goes into the file."""
    if array.nbytes < LARGE_BYTES or array.dtype.hasobject:
        return None
    numpy = sys.modules["numpy"]
    is_fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    flat = numpy.ascontiguousarray(array.T if is_fortran else array).reshape(-1)
    facts = ("array", array.dtype, array.shape, is_fortran)
    return memoryview(flat.view(numpy.uint8)), facts


class _Unpacker(pickle.Unpickler):
    """Reads large tensors and arrays from the file, each once."""

    def __init__(self, stream: io.BytesIO, file: int, on_rank: bool) -> None:
        super().__init__(stream)
        self._file = file
        self._on_rank = on_rank
        self._made: dict[int, Any] = {}

    def persistent_load(self, place: tuple[Any, ...]) -> Any:
        """Return the tensor or array whose data lies at this place."""
        index, offset, kind, *facts = place
        if index not in self._made:
            make = self._tensor if kind == "tensor" else self._array
            self._made[index] = make(offset, *facts)
        return self._made[index]

    def _tensor(
        self, offset: int, dtype: str, shape: tuple[int, ...], flags: tuple[bool, bool]
    ) -> Any:
        import torch

        on_gpu, requires_grad = flags
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        self._read(tensor.view(-1).view(torch.uint8).numpy().data, offset)
        if on_gpu and self._on_rank:
            tensor = tensor.cuda()
        return tensor.requires_grad_(requires_grad)

    def _array(self, offset: int, dtype: Any, shape: tuple[int, ...], is_fortran: bool) -> Any:
        import numpy as np

        array = np.empty(shape, dtype, order="F" if is_fortran else "C")
        flat = (array.T if is_fortran else array).reshape(-1)
        self._read(flat.view(np.uint8).data, offset)
        return array

    def _read(self, memory: memoryview, offset: int) -> None:
        done = 0
        while done < memory.nbytes:
            piece = memory[done : done + MAX_CALL_BYTES]
            count = os.preadv(self._file, [piece], offset + done)
            if not count:
                raise EOFError(f"the file of large data ends {memory.nbytes - done} bytes early")
            done += count


def _write(buffers: list[memoryview], directories: Sequence[str], file_name: str) -> str:
    """Write buffers to a new file in the first directory that has room."""
    num_bytes = sum(buffer.nbytes for buffer in buffers)
    for directory in directories:
        found = os.statvfs(directory)
        if found.f_bavail * found.f_frsize < num_bytes + SPARE_BYTES:
            continue
        path = Path(directory) / file_name
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                for buffer in buffers:
                    _write_all(file, buffer)
            finally:
                os.close(file)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            continue
        return str(path)
    raise NbdistError(
        f"{num_bytes / 2**20:.0f} MiB of tensors and arrays were to be copied, but none of "
        f"{', '.join(directories)} has room for them; free some, or copy them in parts"
    )


def _write_all(file: int, buffer: memoryview) -> None:
    done = 0
    while done < buffer.nbytes:
        done += os.write(file, buffer[done : done + MAX_CALL_BYTES])
