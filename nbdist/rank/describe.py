"""One row of the list of names: type, shape, place, size and digest of a value (rank).

Nothing here is collective. Values are compared by digests that every rank computes alone.
"""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
import sys
import types
from typing import Any

from nbdist.messages import NameRow

__all__ = ["describe"]

log = logging.getLogger(__name__)

WHOLE_BYTES = 1 << 20  # data up to this size is hashed whole
SAMPLE_ITEMS = 1 << 14
MAX_ITEMS = 10_000  # of a container
NOT_COMPARED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_PLAIN = (types.NoneType, bool, int, float, complex, str, bytes)


class _NotComparedError(Exception):
    """The value is too large to hash, or of a kind that has no value of its own."""


def describe(name: str, value: Any) -> NameRow:
    """Return the row of a name; of a value that cannot be looked at, name and type only."""
    try:
        return _describe(name, value)
    except Exception:
        # Attributes of a user's class may raise anything.
        log.debug("%s cannot be described", name, exc_info=True)
        return NameRow(name=name, type_name=type(value).__name__)


def _describe(name: str, value: Any) -> NameRow:
    if is_tensor(value) or _is_array(value):
        return _describe_data(name, value)
    row: dict[str, Any] = {"name": name, "type_name": type(value).__name__}
    torch = sys.modules["torch"]
    if isinstance(value, torch.nn.Module):
        return NameRow(**row, **_module_facts(value))
    digest = Digest()
    try:
        digest.add(value)
    except _NotComparedError:
        return NameRow(**row)
    except Exception:
        # A user's __reduce__ may raise anything.
        log.debug("%s cannot be compared", name, exc_info=True)
        return NameRow(**row)
    shape = f"{len(value)} items" if isinstance(value, list | tuple | dict | set) else ""
    return NameRow(
        **row,
        shape=shape,
        num_bytes=digest.num_bytes,
        digest=digest.text(),
        is_sampled=digest.is_sampled,
    )


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor."""
    return isinstance(value, sys.modules["torch"].Tensor)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def local_part(value: Any) -> tuple[Any, str]:
    """Return a tensor's part on this rank and its placements; no communication."""
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and isinstance(value, tensors.DTensor):
        placements = ", ".join(map(str, value.placements))
        return value._local_tensor, placements
    return value, ""


def _describe_data(name: str, value: Any) -> NameRow:
    data, placements = local_part(value)
    digest = Digest()
    text = ""
    if not _is_split(value):
        try:
            digest.add_data(data)
            text = digest.text()
        except Exception:
            # Sparse, quantized and meta tensors have no plain bytes.
            log.debug("%s cannot be compared", name, exc_info=True)
    return NameRow(
        name=name,
        type_name=type(value).__name__,
        shape=str(tuple(data.shape)),
        dtype=str(data.dtype).removeprefix("torch."),
        device=str(getattr(data, "device", "cpu")),
        num_bytes=int(data.nbytes),
        placements=placements,
        digest=text,
        is_sampled=digest.is_sampled,
    )


def _is_split(value: Any) -> bool:
    """Return whether ranks hold different parts by intention."""
    if local_part(value)[0] is value:
        return False
    return any(not placement.is_replicate() for placement in value.placements)


def _module_facts(module: Any) -> dict[str, Any]:
    tensors = [*module.parameters(), *module.buffers()]
    parts = [local_part(tensor)[0] for tensor in tensors]
    digest = Digest()
    is_split = any(_is_split(tensor) for tensor in tensors)
    if not is_split:
        for part in parts:
            digest.add_sample(part)
    return {
        "shape": f"{sum(part.numel() for part in parts):,} numbers",
        "dtype": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parts})),
        "device": ", ".join(sorted({str(part.device) for part in parts})),
        "num_bytes": sum(part.nbytes for part in parts),
        "placements": "sharded" if is_split else "",
        "digest": "" if is_split else digest.text(),
        "is_sampled": not is_split,
    }


class Digest:
    """A hash of a value that is the same in every process.

    Large tensors and arrays add a sample and their sum; `is_sampled` says so. `num_bytes` counts
    the data of all tensors and arrays.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)
        self._num_items = 0
        self.num_bytes = 0
        self.is_sampled = False

    def text(self) -> str:
        """Return the hash in hexadecimal."""
        return self._hash.hexdigest()

    def add(self, value: Any) -> None:
        """Add any value; raises when it cannot be compared."""
        self._num_items += 1
        if self._num_items > MAX_ITEMS or isinstance(value, NOT_COMPARED):
            raise _NotComparedError
        self._hash.update(type(value).__name__.encode() + b":")
        if is_tensor(value) or _is_array(value):
            if _is_split(value):
                raise _NotComparedError
            self.add_data(local_part(value)[0])
        elif isinstance(value, dict):
            for key, item in value.items():
                self.add(key)
                self.add(item)
        elif isinstance(value, list | tuple):
            for item in value:
                self.add(item)
        elif isinstance(value, set | frozenset):
            # Their order differs from process to process, and so do reprs of most objects.
            if not all(isinstance(item, _PLAIN) for item in value):
                raise _NotComparedError
            self._hash.update(repr(sorted(map(repr, value))).encode())
        elif isinstance(value, _PLAIN):
            self._hash.update(repr(value).encode("utf-8", "surrogatepass"))
        else:
            self._hash.update(_pickled(value))
        self._hash.update(b";")

    def add_data(self, data: Any) -> None:
        """Add a tensor or an array; a large one by a sample and its sum."""
        self.num_bytes += int(data.nbytes)
        self._hash.update(f"{tuple(data.shape)}{data.dtype}".encode())
        if data.nbytes <= WHOLE_BYTES:
            self._hash.update(_bytes_of(data))
            return
        self.add_sample(data)
        if is_tensor(data):
            torch = sys.modules["torch"]
            exact = not (data.is_floating_point() or data.is_complex())
            total = data.detach().sum(dtype=torch.int64 if exact else None).item()
        else:
            total = data.sum()
        self._hash.update(repr(total).encode())

    def add_sample(self, data: Any) -> None:
        """Add evenly spaced items of a tensor or an array."""
        self.is_sampled = True
        flat = data.detach() if is_tensor(data) else data
        flat = flat.reshape(-1)
        step = max(1, len(flat) // SAMPLE_ITEMS)
        self._hash.update(_bytes_of(flat[::step]))


def _bytes_of(data: Any) -> bytes:
    if is_tensor(data):
        torch = sys.modules["torch"]
        flat = data.detach().resolve_conj().resolve_neg().cpu().reshape(-1).contiguous()
        return bytes(flat.view(torch.uint8).numpy())
    if data.dtype.hasobject:
        raise _NotComparedError
    return bytes(data.tobytes())


def _pickled(value: Any) -> bytes:
    """Return the pickle of a small value."""
    sink = _Sink()
    pickle.Pickler(sink, protocol=5).dump(value)
    return sink.getvalue()


class _Sink(io.BytesIO):
    """Refuses to take more than a small value."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > WHOLE_BYTES:
            raise _NotComparedError
        return super().write(data)
