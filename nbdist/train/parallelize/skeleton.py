"""A model without its weights: enough to build it again on other process groups (ranks)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nbdist.errors import NbdistError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Skeleton"]


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A whole module whose weights have no memory; buffers keep their values.

    Attributes:
        module: on the meta device; None when it could not be copied.
        problem: why not, in words.
    """

    module: nn.Module | None
    problem: str = ""

    @classmethod
    def of(cls, model: nn.Module) -> Skeleton:
        """Return the skeleton of a whole model; costs a copy of its Python objects."""
        try:
            return cls(_copy(model, torch.device("meta")))
        except Exception as error:  # noqa: BLE001 - whatever a user's class raises when it is copied
            return cls(None, f"{type(model).__name__}: {type(error).__name__}: {error}")

    def build(self, device: torch.device) -> nn.Module:
        """Return a new module with memory for its weights, not initialised.

        Raises:
            NbdistError: the model could not be copied.
        """
        if self.module is None:
            raise NbdistError(
                f"the model was to be built again, but it cannot be copied: {self.problem}; let "
                "copy.deepcopy(model) work"
            )
        return _copy(self.module, device)


def _copy(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a deep copy whose weights are new and empty; weights that are tied stay tied."""
    memo: dict[int, Any] = {id(p): _empty(p, device) for p in module.parameters()}
    return copy.deepcopy(module, memo)


def _empty(parameter: Tensor, device: torch.device) -> nn.Parameter:
    room = torch.empty_like(parameter, device=device)
    return nn.Parameter(room, requires_grad=parameter.requires_grad)
