"""Weights of a served model in 8 or 4 bits, multiplied by torch's own kernels (rank).

Only weights are quantised: activations, sums, norms, embeddings and the cache keep their type.
The CPU kernels are private to torch, so each is tried once. They are used for bfloat16 only: for
float32 they are plain loops, up to a hundred times slower than a product. Elsewhere (float32, other
devices, a torch without them) the weight is widened for each product: memory is saved, no time is.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from nbdist.errors import ServeError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Bits", "Int4Linear", "Int8Linear", "check_bits", "quantise", "weight_bytes"]

Bits: TypeAlias = Literal[8, 4]

_GROUP = 32  # inputs that share a scale in 4 bits
_OUTPUTS = 16  # the 4-bit kernel takes outputs in blocks of so many
_HEADS = {"head", "lm_head"}  # names of output heads: nbdist's and transformers'
_KERNEL_ROWS = 16  # with more rows, widening 8-bit weights once is faster than the kernel


class Int8Linear(nn.Module):
    """A linear layer with symmetric 8-bit weights, one scale an output.

    Args:
        linear: its weights (O, I) are rounded; it is not changed.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = (weight.float().abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        codes = (weight.float() / scale[:, None]).round().to(torch.int8)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale.to(weight.dtype))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def widened(self) -> Tensor:
        """Return the weights (O, I) that the layer stands for."""
        weight: Tensor = self.codes.to(self.scale.dtype) * self.scale[:, None]
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., I); the answer is (..., O)."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()  # the kernel takes nothing else
        if len(rows) > _KERNEL_ROWS or not _has_kernel(8, x.device.type, x.dtype):
            return functional.linear(x, self.widened(), self.bias)
        return _shaped(torch._weight_int8pack_mm(rows, self.codes, self.scale), x, self.bias)


class Int4Linear(nn.Module):
    """A linear layer with 4-bit weights, a scale and a zero for each 32 inputs of an output.

    Args:
        linear: its weights (O, I) are rounded; it is not changed. I is a multiple of 32 and O of
            16.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        groups = _by_group(weight.float())
        low, high = groups.aminmax(dim=-1)
        scale = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny)
        codes = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15)
        codes = codes.flatten(1).to(torch.int32)
        self.packed = _has_kernel(4, weight.device.type, weight.dtype)
        self.register_buffer("codes", _packed(codes) if self.packed else _nibbles(codes))
        # the kernel's order: (I / 32, O, 2), and code 8 stands for the zero
        scales = torch.stack([scale, low + 8 * scale], dim=-1).transpose(0, 1).contiguous()
        self.register_buffer("scales", scales.to(weight.dtype))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., I); the answer is (..., O)."""
        if not self.packed:
            return functional.linear(x, self._widened(), self.bias)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        answer = torch._weight_int4pack_mm_for_cpu(rows, self.codes, _GROUP, self.scales)
        return _shaped(answer, x, self.bias)

    def _widened(self) -> Tensor:
        codes = torch.stack([self.codes & 15, self.codes >> 4], dim=-1).flatten(1)
        groups = _by_group(codes).to(self.scales.dtype) - 8
        scale, zero = self.scales.transpose(0, 1).unbind(-1)
        weight: Tensor = (groups * scale[..., None] + zero[..., None]).flatten(1)
        return weight


def quantise(model: nn.Module, bits: Bits) -> nn.Module:
    """Replace the linear layers of `model` in place, and return it.

    A layer whose weight is also the embedding stays as it is. In 4 bits the output head, and
    layers of sizes that the kernel cannot take, get 8: an error there costs most and saves least.

    Raises:
        ValueError: `bits` is neither 8 nor 4.
        ServeError: the model has no linear layer to quantise.
    """
    check_bits(bits)
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) not in tied
    ]
    if not found:
        raise ServeError(
            f"weight_bits={bits} was asked for, but {type(model).__name__} has no linear layer "
            "with weights of its own; serve it with weight_bits=None"
        )
    for name, linear in found:
        fits = linear.in_features % _GROUP == 0 and linear.out_features % _OUTPUTS == 0
        fine = bits == 8 or not fits or name.rpartition(".")[2] in _HEADS
        model.set_submodule(name, Int8Linear(linear) if fine else Int4Linear(linear))
    return model


def check_bits(bits: int | None) -> None:
    """Refuse, before anything is gathered, bits that there is no layer for.

    Raises:
        ValueError: `bits` is not 8, 4 or None.
    """
    if bits not in {8, 4, None}:
        raise ValueError(f"weight_bits={bits!r} is unknown; choose 8, 4, or None for full weights")


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers; a shared one counts once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def _shaped(rows: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    answer = rows.reshape(*x.shape[:-1], -1)
    return answer if bias is None else answer + bias


def _packed(codes: Tensor) -> Tensor:
    return torch._convert_weight_to_int4pack_for_cpu(codes, 1)


def _nibbles(codes: Tensor) -> Tensor:
    low, high = codes.to(torch.uint8).view(len(codes), -1, 2).unbind(-1)
    return torch.bitwise_or(low, torch.bitwise_left_shift(high, 4))


def _by_group(matrix: Tensor) -> Tensor:
    return matrix.view(len(matrix), -1, _GROUP)


@cache
def _has_kernel(bits: int, device: str, dtype: torch.dtype) -> bool:
    """Whether torch's kernel is fast here and gives the product of a matrix that is exact in it."""
    if device != "cpu" or dtype is not torch.bfloat16:
        return False
    x = torch.eye(_GROUP, dtype=dtype)
    codes = torch.arange(_OUTPUTS * _GROUP).reshape(_OUTPUTS, _GROUP) % 16
    try:
        if bits == 8:
            one = torch.ones(_OUTPUTS, dtype=dtype)
            answer = torch._weight_int8pack_mm(x, codes.to(torch.int8), one)
        else:
            scales = torch.tensor([1.0, 8.0], dtype=dtype).expand(1, _OUTPUTS, 2).contiguous()
            packed = _packed(codes.to(torch.int32))
            answer = torch._weight_int4pack_mm_for_cpu(x, packed, _GROUP, scales)
    except (AttributeError, RuntimeError):
        return False
    return bool(torch.equal(answer.T, codes.to(dtype)))
