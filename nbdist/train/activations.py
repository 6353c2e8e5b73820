"""What a rank holds of a model's weights, and what a forward keeps for backward, counted (ranks).

Nothing is computed or allocated: the forward runs on fake tensors, which choose the same kernels as
real ones of that device do. (On the meta device attention would keep its whole matrix.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from nbdist.train.parallelize.data import blocks
from nbdist.train.parallelize.tensor import resolve_plan

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["Kept", "count_kept", "local_weights"]

_CUT_DIMS = {"column": 0, "row": 1}
_VOCABULARY = {"embedding": 0, "vocabulary": 0}


class Kept(NamedTuple):
    """Bytes of one forward.

    Attributes:
        activations: that autograd keeps of it, weights not counted.
        output: of what the model returns, if that is a tensor.
    """

    activations: int
    output: int


def local_weights(
    model: nn.Module, tp: int, dims: dict[str, int] = _CUT_DIMS | _VOCABULARY
) -> dict[int, Tensor]:
    """Return what a rank of `tp` holds of each weight, on the meta device, by the weight's `id`.

    Args:
        model: whole; nothing of it is touched.
        tp: ranks that share the layers.
        dims: that weights are cut along, by the style of their layer; other styles count as whole.

    Raises:
        ValueError: no tensor-parallel plan is known for the model, or `tp` does not divide it.
    """
    cut: dict[int, int] = {}
    if tp > 1:
        plan = resolve_plan(model, None, tp, sequence_parallel=False, loss_parallel=False)
        for name, style in plan.items():
            own = model.get_submodule(name).parameters(recurse=False)
            if (dim := dims.get(str(style))) is not None:
                cut |= {id(p): dim for p in own if p.dim() > dim}
    held = {}
    for parameter in model.parameters():
        weight = parameter.detach().to("meta")
        if id(parameter) in cut:
            weight = weight.tensor_split(tp, cut[id(parameter)])[0].clone()
        held[id(parameter)] = weight
    return held


def count_kept(
    model: nn.Module, sample: Tensor, *, checkpoint_activations: bool = False, tp: int = 1
) -> Kept:
    """Return the bytes of one forward of `sample` on a rank.

    Args:
        model: on any device; nothing of it is touched.
        sample: inputs; only shape and dtype matter.
        checkpoint_activations: count the inputs of blocks, and the inside of the largest one.
        tp: ranks that share the layers; what lies between two cut layers is cut too.

    Raises:
        ValueError: the model's forward looks at values, which are not there, or as
            `local_weights`.
    """
    held = local_weights(model, tp, _CUT_DIMS)  # logits are gathered again
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = {n: _like(held[id(p)], device) for n, p in model.named_parameters()}
        for weight in weights.values():
            weight.requires_grad_(weight.is_floating_point())
        weights |= {name: _like(buffer, device) for name, buffer in model.named_buffers()}
        count = _Count({tensor.untyped_storage()._cdata for tensor in weights.values()})
        hooks = [hook for block in blocks(model) for hook in count.watch(block)]
        try:
            with torch.autograd.graph.saved_tensors_hooks(count.keep, lambda tensor: tensor):
                output = functional_call(model, weights, (_like(sample, device),))
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"the activations of {type(model).__name__} were to be counted without values, "
                f"which met: {error}; leave sample out"
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
    kept = sum(count.inside.values())
    if checkpoint_activations:
        kept = count.inputs + max(count.inside.values(), default=0)
    size = output.untyped_storage().nbytes() if isinstance(output, Tensor) else 0
    return Kept(count.outside + kept, size)


def _like(tensor: Tensor, device: str) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


class _Count:
    """Sizes of what autograd keeps, inside and outside blocks; each storage counts once."""

    def __init__(self, known: set[int]) -> None:
        self._known = known
        self._alive: list[Tensor] = []  # or the address of a storage would be used again
        self._block: int | None = None
        self.outside = 0
        self.inputs = 0
        self.inside: dict[int, int] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._alive.append(tensor)
            if self._block is None:
                self.outside += storage.nbytes()
            else:
                self.inside[self._block] = self.inside.get(self._block, 0) + storage.nbytes()
        return tensor

    def watch(self, block: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._block = id(block)
            first = next((a for a in args if isinstance(a, Tensor)), None)
            self.inputs += 0 if first is None else first.numel() * first.element_size()

        def leave(*_: Any) -> None:
            self._block = None

        return block.register_forward_pre_hook(enter), block.register_forward_hook(leave)
