"""Any map-style data set as batches that a step number alone determines (ranks).

Which samples a rank sees at a step, and what is drawn at random for each, is arithmetic on (seed,
step), as in `TextData`: nothing of a loader has to be saved, and a run may go on with another
number of ranks or workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MapData", "MapRankData", "MapStyle"]

Collate = Callable[[list[Any]], Any]


class MapStyle(Protocol):
    """A data set with a length, read by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class _Key(NamedTuple):
    """A sample of the data set, and the seed of what is drawn for it."""

    sample: int
    seed: int
    place: int


class MapData:
    """A map-style data set, read through torch's DataLoader.

    Each epoch visits every sample once, in an order of its own; a batch may span two epochs, so
    none is short and no sample is left out. Random numbers that a sample draws from torch, numpy
    (legacy) or `random` depend on the seed and the sample's place in the run: they differ by
    sample, epoch and rank, and are equal for any number of workers. Generators of the process
    are left as they were, so ranks keep equal initial weights.

    Args:
        dataset: of samples; each an (inputs, targets) pair, or what `collate_fn` makes one of.
        validation: another data set, read whole and in order; None for none.
        seed: of order and draws.
        shuffle: False keeps the order of the data set in every epoch.
        collate_fn: makes (inputs, targets), rows first, of a list of samples.
        num_workers: processes a rank that read ahead; 0 reads in the rank itself.
        **loader_options: of `torch.utils.data.DataLoader`, such as `pin_memory` or
            `prefetch_factor`.

    Raises:
        ValueError: a data set has no length, or none above 0; a loader option is set here.
    """

    def __init__(
        self,
        dataset: MapStyle,
        *,
        validation: MapStyle | None = None,
        seed: int = 0,
        shuffle: bool = True,
        collate_fn: Collate = default_collate,
        num_workers: int = 0,
        **loader_options: Any,
    ) -> None:
        for name, one in (("dataset", dataset), ("validation", validation)):
            if one is not None and not (isinstance(one, Sized) and len(one) > 0):
                raise ValueError(
                    f"MapData was given {name}={type(one).__name__} without samples, or without "
                    "__len__: which rank reads what could not be told; give a map-style data set "
                    "with at least one sample"
                )
        ours = {"batch_size", "batch_sampler", "sampler", "drop_last", "generator"}
        if wrong := sorted(ours & set(loader_options)):
            raise ValueError(
                f"MapData was given {', '.join(wrong)}: batches are dealt by step and rank; set "
                "TrainConfig(global_batch_size=...), seed or shuffle instead"
            )
        self.dataset, self.validation = dataset, validation
        self.seed, self.shuffle = seed, shuffle
        self.collate_fn, self.num_workers = collate_fn, num_workers
        self.loader_options = loader_options

    def __repr__(self) -> str:
        held_out = len(self.validation) if self.validation is not None else 0
        return f"MapData({len(self.dataset)} training and {held_out} validation samples)"

    def order(self, epoch: int) -> np.ndarray:
        """Return the indices of all samples in the order of one epoch."""
        number = len(self.dataset)
        if not self.shuffle:
            return np.arange(number)
        return np.random.default_rng((self.seed, epoch)).permutation(number)

    def for_rank(self, *, global_batch_size: int, rank: int, world_size: int) -> MapRankData:
        """Return the part of one data-parallel rank; see `TextData.for_rank`.

        Raises:
            ValueError: a rank would have no row, of a batch or of the validation samples.
        """
        held_out = len(self.validation) if self.validation is not None else world_size
        if not 0 <= rank < world_size <= min(global_batch_size, held_out):
            raise ValueError(
                f"global_batch_size={global_batch_size} and {held_out} validation samples cannot "
                f"be dealt to rank={rank} of world_size={world_size}: every rank needs a row; set "
                f"global_batch_size >= {world_size} and give at least as many validation samples"
            )
        return MapRankData(self, global_batch_size, rank, world_size)


@dataclass(slots=True)
class MapRankData:
    """The samples of a `MapData` that one data-parallel rank sees."""

    data: MapData
    global_batch_size: int
    rank: int
    world_size: int
    _epoch: tuple[int, np.ndarray] | None = None
    _next_step: int = -1
    _batches: Iterator[Any] = field(default_factory=lambda: iter(()))

    def sample_ids(self, step: int) -> list[int]:
        """Return the indices of this rank's rows; the ranks' lists in order are the batch."""
        return [key.sample for key in self._keys(step)]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's (inputs, targets) of a step, rows first.

        A pure function; workers read ahead the steps that follow, so going on is fastest.
        """
        if self.data.num_workers == 0:
            return _pair(self.data.collate_fn(_read(self.data.dataset, self._keys(step))))
        if step != self._next_step:
            self._batches = self._loader(step)
        self._next_step = step + 1
        return _pair(next(self._batches))

    @property
    def num_validation_batches(self) -> int:
        """Number of validation batches, the same on all ranks; together they are all samples.

        They differ by one row at most, so that none is too short for the ranks; for that they may
        be longer than `global_batch_size` where the ranks are many.
        """
        if self.data.validation is None:
            return 0
        number = len(self.data.validation)
        return min(-(-number // self.global_batch_size), number // self.world_size)

    def validation_batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of a validation batch, shaped as those of `batch`."""
        validation = self.data.validation
        assert validation is not None, "there are no validation batches to ask for"
        parts, number = self.num_validation_batches, len(validation)
        first, end = index * number // parts, (index + 1) * number // parts
        start, stop = self._slice(end - first)
        keys = [_Key(at, self.data.seed, at) for at in range(first + start, first + stop)]
        return _pair(self.data.collate_fn(_read(validation, keys)))

    def _keys(self, step: int) -> list[_Key]:
        start, stop = self._slice(self.global_batch_size)
        first, size = step * self.global_batch_size, len(self.data.dataset)
        places = range(first + start, first + stop)
        return [_Key(self._sample(*divmod(at, size)), self.data.seed, at) for at in places]

    def _sample(self, epoch: int, place: int) -> int:
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self.data.order(epoch))
        return int(self._epoch[1][place])

    def _slice(self, size: int) -> tuple[int, int]:
        return self.rank * size // self.world_size, (self.rank + 1) * size // self.world_size

    def _loader(self, step: int) -> Iterator[Any]:
        """Return an endless reader of this rank's batches from a step on."""
        options = {"worker_init_fn": None} | self.data.loader_options
        return iter(
            DataLoader(
                _Drawn(self.data.dataset),
                batch_sampler=_Steps(self, step),
                collate_fn=self.data.collate_fn,
                num_workers=self.data.num_workers,
                generator=torch.Generator(),  # else its seed would be drawn from the process's
                **options,
            )
        )


class _Steps:
    """The keys of one batch after the other."""

    def __init__(self, rows: MapRankData, step: int) -> None:
        self._rows, self._step = rows, step

    def __iter__(self) -> Iterator[list[_Key]]:
        step = self._step
        while True:
            yield self._rows._keys(step)
            step += 1


class _Drawn(torch.utils.data.Dataset[Any]):
    """A data set whose samples draw what their key says."""

    def __init__(self, dataset: MapStyle) -> None:
        self._dataset = dataset

    def __getitem__(self, key: _Key) -> Any:
        return _read(self._dataset, [key])[0]


def _read(dataset: MapStyle, keys: list[_Key]) -> list[Any]:
    samples = []
    with _own_generators():
        for key in keys:
            words = np.random.SeedSequence((key.seed, key.place)).generate_state(3)
            torch.default_generator.manual_seed(int(words[0]))  # not the GPU's
            np.random.seed(int(words[1]))
            random.seed(int(words[2]))
            samples.append(dataset[key.sample])
    return samples


@contextmanager
def _own_generators() -> Iterator[None]:
    """Leave the process's generators as they were."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    if not is_pair or not all(isinstance(part, torch.Tensor) for part in batch):
        raise ValueError(
            f"a batch of (inputs, targets) was asked of MapData, but its samples make a "
            f"{type(batch).__name__}; give a collate_fn that returns two tensors, rows first"
        )
    return batch[0], batch[1]
