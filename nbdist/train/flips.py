"""Finds state that should be equal on several ranks and is not: a flipped bit (ranks)."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nbdist.errors import StateMismatchError
from nbdist.train.parallelize import bare
from nbdist.train.survival.mirror import place_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from nbdist.train.config import TrainConfig

__all__ = ["Difference", "FlipCheck", "digest", "find_differences"]

_log = logging.getLogger(__name__)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that is not the same on all ranks that should have it.

    Attributes:
        tensor: its name.
        odd: the ranks that differ from the most; all of them where no value has the most.
        ranks: all ranks that should have it equal.
    """

    tensor: str
    odd: tuple[int, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        rest = [str(rank) for rank in self.ranks if rank not in self.odd]
        odd = ", ".join(map(str, self.odd))
        if not rest:
            return f"ranks {odd} have different `{self.tensor}`"
        return f"rank {odd} has another `{self.tensor}` than rank {', '.join(rest)}"


class FlipCheck:
    """Compares weights and optimizer state of data-parallel replicas.

    DDP and `dp_replicate` keep them equal, bit for bit. Shards, which one rank alone has, and
    buffers, which DDP lets differ within a step, are not compared.

    Args:
        model: from `parallelize`.
        optimizer: of the model.
        mesh: the whole mesh.
        config: its `check_every`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh,
        config: TrainConfig,
    ) -> None:
        self._model, self._optimizer, self._mesh = model, optimizer, mesh
        self._every = config.check_every
        self._places: list[tuple[int, ...]] | None = None

    def check(self, step: int) -> None:
        """Compare the state after a step, if that is due. Collective over: the default group.

        Sends 8 bytes a rank; the digests of all tensors only if those differ.

        Raises:
            StateMismatchError: on all ranks; names the ranks and tensors that differ.
        """
        if self._every is None or step % self._every:
            return
        places = self._places = self._places or self._gather_places()
        if len(set(places)) == len(places):
            return
        names, digests = zip(*((name, digest(t)) for name, t in self._tensors()), strict=True)
        device = self._mesh.device_type
        own = torch.stack([one.to(device) for one in digests])
        odd_factors = torch.arange(1, 2 * len(own), 2, device=device)  # one change is never lost
        totals = own.new_zeros(len(places))
        totals[dist.get_rank()] = (own * odd_factors).sum()
        dist.all_reduce(totals)
        found = dict(zip(range(len(places)), totals.tolist(), strict=True))
        if not find_differences({"": found}, places):
            return
        everyone: list[dict[str, int]] = [{}] * len(places)
        dist.all_gather_object(everyone, dict(zip(names, own.tolist(), strict=True)))
        by_name: dict[str, dict[int, int]] = {}
        for rank, theirs in enumerate(everyone):
            for name, value in theirs.items():
                by_name.setdefault(name, {})[rank] = value
        raise StateMismatchError(self._text(step, find_differences(by_name, places)))

    def _gather_places(self) -> list[tuple[int, ...]]:
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, place_of(self._model, self._mesh))
        if len(set(places)) == len(places) and dist.get_rank() == 0:
            _log.warning(
                "check_every=%d compares nothing: no two ranks have equal weights; set "
                "dp_replicate > 1 or strategy='ddp', or leave check_every out",
                self._every,
            )
        return places

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in bare(self._model).named_parameters():
            yield name, parameter
            state = self._optimizer.state.get(parameter, {})
            for key, value in sorted(state.items()):
                if isinstance(value, torch.Tensor):
                    yield f"{name} ({key} of the optimizer)", value

    def _text(self, step: int, differences: list[Difference]) -> str:
        shown = "; ".join(map(str, differences[:_MOST_SHOWN]))
        rest = len(differences) - _MOST_SHOWN
        more = f"; and {rest} more tensors" if rest > 0 else ""
        return (
            f"equal state of ranks was compared after step {step} (check_every={self._every}): "
            f"{shown}{more}; a bit has flipped, or code has changed one copy alone. Nothing of "
            "this step was saved: go on from a checkpoint with fit(resume=True), and if it comes "
            "again replace that rank's device or memory"
        )


def digest(tensor: Tensor) -> Tensor:
    """Return a sum over all bits of this rank's part of a tensor, a scalar of int64.

    One flipped bit always changes it.
    """
    local = tensor.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    return local.reshape(-1).view(_INTEGERS.get(local.itemsize, torch.int64)).sum(dtype=torch.int64)


def find_differences(
    digests: dict[str, dict[int, int]], places: list[tuple[int, ...]]
) -> list[Difference]:
    """Return the tensors that differ between ranks of one place.

    Args:
        digests: by name of the tensor and rank.
        places: by rank; equal for ranks with equal state.
    """
    found = []
    for name, by_rank in digests.items():
        for place in dict.fromkeys(places[rank] for rank in by_rank):
            ranks = tuple(rank for rank in by_rank if places[rank] == place)
            common = Counter(by_rank[rank] for rank in ranks).most_common(2)
            if len(common) == 1:
                continue
            is_tie = common[0][1] == common[1][1]
            odd = tuple(r for r in ranks if is_tie or by_rank[r] != common[0][0])
            found.append(Difference(name, odd, ranks))
    return found
