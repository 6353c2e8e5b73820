"""Where a run first met NaN or infinity: the layer and the rank (ranks)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nbdist.errors import NonFiniteError
from nbdist.train.parallelize import applied_to, bare

if TYPE_CHECKING:
    from types import TracebackType

    from torch import nn
    from torch.utils.hooks import RemovableHandle

__all__ = ["AnomalyWatch"]


class AnomalyWatch:
    """While entered, looks at what every layer returns and at its gradient.

    A rank that met something keeps quiet until `raise_together`: one rank's error in the middle
    of a step would leave the others in a collective. Costs a wait for the device a layer.

    Args:
        model: from `parallelize`.
        enabled: without it, nothing is looked at.

    Raises:
        ValueError: the model's blocks are compiled: their layers are not called one by one.
    """

    def __init__(self, model: nn.Module, *, enabled: bool) -> None:
        applied = applied_to(model)
        if enabled and applied and applied.again and applied.again.options["compile_blocks"]:
            raise ValueError(
                "detect_anomaly=True was asked for a model with compile_blocks=True, whose layers "
                "are no longer called one by one; leave one of the two out"
            )
        self._model = bare(model)
        self._enabled = enabled
        self._hooks: list[RemovableHandle] = []
        self._found: str | None = None

    def __enter__(self) -> Self:
        if self._enabled:
            for name, module in self._model.named_modules():
                if next(module.children(), None) is None:
                    self._hooks.append(module.register_forward_hook(self._looker(name)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _looker(self, name: str) -> Any:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            if not isinstance(output, torch.Tensor):
                return
            self._note(output.detach(), f"the output of `{name}`")
            if output.requires_grad:
                output.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: self._note(gradient, f"the gradient at `{name}`")
                )

        return look

    def _note(self, tensor: torch.Tensor, what: str) -> None:
        if self._found is not None or not tensor.is_floating_point():
            return
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not bool(torch.isfinite(local).all()):
            kind = "NaN" if bool(torch.isnan(local).any()) else "infinity"
            self._found = f"{what} has {kind}, shape {tuple(local.shape)}"

    def raise_together(self, step: int) -> None:
        """Raise on all ranks if one met something. Collective over: the default group.

        Args:
            step: of the batch, for the text.

        Raises:
            NonFiniteError: names every rank that met something, and its first layer.
        """
        if not self._enabled:
            return
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self._found)
        self._found = None
        met = {rank: text for rank, text in enumerate(found) if text}
        if met:
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in met.items())
            raise NonFiniteError(
                f"step {step} met values that are not finite, first at: {listed}; the weights are "
                "those before it; look at its batch, lower learning_rate, or keep that layer out "
                "of lower precision"
            )
