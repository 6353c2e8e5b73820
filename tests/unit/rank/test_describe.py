"""What a rank says of a value, and that digests are equal when values are."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nbdist.rank.describe import describe


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (torch.ones(3), torch.tensor([1.0, 1.0, 2.0])),
        (torch.ones(3), torch.ones(3, dtype=torch.float64)),
        (torch.zeros(4), torch.zeros(2, 2)),
        (torch.tensor([0.0]), torch.tensor([float("nan")])),
        (np.arange(5), np.arange(5) + 1),
        ([1, {"a": (2.0, None)}], [1, {"a": (2.0, False)}]),
        (1, True),
        ("a", b"a"),
        ({"x": torch.ones(2)}, {"x": torch.zeros(2)}),
        (SimpleNamespace(lr=1), SimpleNamespace(lr=2)),
    ],
)
def test_digest_differs_when_values_do(value, other):
    assert describe("x", value).digest
    assert describe("x", value) != describe("x", other)


def test_large_tensor_is_compared_by_sample_and_sum():
    ones = torch.ones(1 << 20)
    changed = ones.clone()
    changed[12_345] = 3.0
    row = describe("x", ones)
    assert row.is_sampled
    assert row.num_bytes == 4 << 20
    assert row == describe("x", ones.clone())
    assert row.digest != describe("x", changed).digest


@pytest.mark.parametrize(
    "value", [len, describe, int, (i for i in ()), list(range(20_000)), {object()}]
)
def test_what_has_no_comparable_value_gets_no_digest(value):
    row = describe("x", value)
    assert row.digest == ""
    assert row.type_name == type(value).__name__


def test_module_tells_its_numbers_and_device():
    row = describe("net", torch.nn.Linear(10, 3).bfloat16())
    assert (row.shape, row.dtype, row.device, row.num_bytes) == (
        "33 numbers",
        "bfloat16",
        "cpu",
        66,
    )
    assert row.is_sampled


def test_tensor_without_plain_data_is_still_described():
    row = describe("x", torch.empty(2, 3, device="meta"))
    assert (row.shape, row.device, row.digest) == ("(2, 3)", "meta", "")
    assert describe("s", torch.eye(3).to_sparse()).type_name == "Tensor"


def test_digest_of_a_set_is_the_same_in_every_process():
    code = (
        "import torch; from nbdist.rank.describe import describe; "
        "print(describe('x', {'a', 'b', 'c', 'd', 'e'}).digest)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(found) == 1
