"""Packing: large data into one file, the rest into a stream, everything back bit by bit."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nbdist import bulk
from nbdist.errors import NbdistError

BIG = 1 << 20


def there_and_back(value, directory):
    """Return the copy, the stream's length and the file's."""
    stream, path = bulk.pack(value, [str(directory)], "data")
    copied = bulk.unpack(stream, path, on_rank=False)
    return copied, len(stream), Path(path).stat().st_size if path else 0


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64]
)
def test_tensor_of_each_dtype_comes_back_bitwise(tmp_path, dtype):
    tensor = (torch.arange(BIG) % 2).to(dtype).reshape(2, -1)
    copied, in_stream, in_file = there_and_back(tensor, tmp_path)
    assert copied.dtype == dtype
    assert copied.shape == tensor.shape
    assert torch.equal(copied.view(torch.uint8), tensor.view(torch.uint8))
    assert in_stream < 1000
    assert in_file == tensor.nbytes


def test_arrays_keep_their_order_and_dtype(tmp_path):
    c_order = np.arange(BIG // 2, dtype=np.float64).reshape(4, -1)
    value = {
        "c": c_order,
        "fortran": np.asfortranarray(c_order),
        "strided": c_order[:, ::2],
        "times": np.arange(BIG // 4).astype("datetime64[s]"),
        "fields": np.zeros(BIG // 8, dtype=[("a", "i4"), ("b", "f8")]),
    }
    copied, in_stream, _ = there_and_back(value, tmp_path)
    for name, array in value.items():
        assert copied[name].dtype == array.dtype
        assert np.array_equal(copied[name], array), name
        assert copied[name].flags.writeable
    assert copied["fortran"].flags.f_contiguous
    assert in_stream < 2000


def test_nested_value_is_copied_whole_and_shares_nothing(tmp_path):
    big = torch.randn(BIG // 4)
    model = torch.nn.Linear(1024, 1024)
    value = {"list": [big, (big, "small")], "state": model.state_dict(), "model": model, "n": 3}
    copied, in_stream, in_file = there_and_back(value, tmp_path)
    assert copied["list"][0] is copied["list"][1][0]  # one tensor stays one tensor
    assert torch.equal(copied["list"][0], big)
    assert isinstance(copied["model"].weight, torch.nn.Parameter)
    assert copied["model"].weight.requires_grad
    assert torch.equal(copied["state"]["weight"], model.weight)
    assert (copied["n"], copied["list"][1][1]) == (3, "small")
    kept = big.clone()
    copied["list"][0].zero_()
    assert torch.equal(big, kept)
    assert in_stream < 16_000
    assert in_file >= big.nbytes + model.weight.nbytes


def test_small_values_make_no_file(tmp_path):
    value = {"x": torch.ones(10), "f": lambda x: x + 1, "o": np.array([{}] * 8)}
    stream, path = bulk.pack(value, [str(tmp_path)], "data")
    assert path == ""
    assert bulk.unpack(stream, path, on_rank=False)["f"](1) == 2
    assert list(tmp_path.iterdir()) == []


def test_views_are_copied_as_they_look(tmp_path):
    base = torch.randn(1024, 1024)
    value = [
        base.t(),
        base[::2],
        torch.ones(1).expand(BIG),
        torch.randn(BIG, dtype=torch.cfloat).conj(),
    ]
    copied, _, _ = there_and_back(value, tmp_path)
    for after, before in zip(copied, value, strict=True):
        assert torch.equal(after, before)
        after.add_(1)  # each has memory of its own for every element


def test_full_memory_falls_back_to_the_next_directory(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    real = os.write

    def full(file, data):
        if str(first) in str(Path(f"/proc/self/fd/{file}").readlink()):
            raise OSError(errno.ENOSPC, "full")
        return real(file, data)

    monkeypatch.setattr(os, "write", full)
    value = np.ones(BIG)
    stream, path = bulk.pack(value, [str(first), str(second)], "data")
    assert path == str(second / "data")
    assert list(first.iterdir()) == []
    assert np.array_equal(bulk.unpack(stream, path, on_rank=False), value)


def test_no_room_anywhere_says_how_much_was_wanted(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_frsize=4096))
    with pytest.raises(NbdistError, match=r"8 MiB of tensors .* none of .* has room"):
        bulk.pack(np.ones(BIG), [str(tmp_path)], "data")


def test_file_is_private(tmp_path):
    _, path = bulk.pack(np.ones(BIG), [str(tmp_path)], "data")
    assert Path(path).stat().st_mode & 0o777 == 0o600
