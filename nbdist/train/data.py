"""Text as batches: which rows a rank sees at a step is arithmetic, so nothing is saved (ranks).

The global batch of a step is a function of (seed, step, global batch size) alone; ranks take
consecutive slices of it. A run may therefore go on with another number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    import tokenizers
    from torch import Tensor

__all__ = ["RankData", "TextData", "TrainData", "build_tokenizer", "shakespeare"]


class RankData(Protocol):
    """One rank's part of a data set."""

    @property
    def num_validation_batches(self) -> int:
        """Number of validation batches: the same on all ranks; 0 for none."""
        ...

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's (inputs, targets) of a step, rows first; a pure function."""
        ...

    def validation_batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Return this rank's (inputs, targets) of a validation batch."""
        ...


class TrainData(Protocol):
    """What a `Trainer` needs of a data set."""

    def for_rank(self, *, global_batch_size: int, rank: int, world_size: int) -> RankData:
        """Return the part of one data-parallel rank."""
        ...


class TextData:
    """A text, tokenized and cut into windows of `context_length` tokens.

    Every window is a sample; its id counts from 0 in the order of the text. The windows at the
    end of the text are kept for validation. Each epoch visits every training window once, in an
    order of its own.

    Args:
        text: the whole text.
        tokenizer: a byte-level tokenizer; one with `vocab_size` ids is built when None.
        vocab_size: of the tokenizer that is built.
        context_length: tokens a sample.
        seed: of the order of the samples.
        validation_fraction: share of the windows kept for validation, 0 for none.

    Raises:
        ValueError: the text is too short for one training window, or an option is out of range.
    """

    def __init__(
        self,
        text: str,
        *,
        tokenizer: tokenizers.Tokenizer | None = None,
        vocab_size: int = 1024,
        context_length: int = 128,
        seed: int = 0,
        validation_fraction: float = 0.1,
    ) -> None:
        if context_length < 1 or seed < 0 or not 0 <= validation_fraction < 1:
            raise ValueError(
                f"TextData got context_length={context_length}, seed={seed}, "
                f"validation_fraction={validation_fraction}; set context_length >= 1, seed >= 0 "
                "and 0 <= validation_fraction < 1"
            )
        self.tokenizer = tokenizer or build_tokenizer(text, vocab_size)
        self.context_length = context_length
        self.seed = seed
        tokens = torch.tensor(self.tokenizer.encode(text).ids, dtype=torch.long)
        num_windows = max(len(tokens) - 1, 0) // context_length
        self.num_validation = round(num_windows * validation_fraction)
        self.num_train = num_windows - self.num_validation
        if self.num_train < 1:
            raise ValueError(
                f"the text has {len(tokens)} tokens, too few for a training window of "
                f"context_length={context_length} and the token after it; give a longer text or "
                "a smaller context_length"
            )
        # a view: sample i holds tokens i*T ... i*T+T, the last one a target only
        self.windows = tokens.unfold(0, context_length + 1, context_length)
        self._order: dict[int, np.ndarray] = {}

    @property
    def vocab_size(self) -> int:
        """Number of token ids: what a model's `vocab_size` has to be."""
        return int(self.tokenizer.get_vocab_size())

    def __repr__(self) -> str:
        return (
            f"TextData({self.num_train} training and {self.num_validation} validation windows of "
            f"{self.context_length} tokens, vocab_size={self.vocab_size})"
        )

    def order(self, epoch: int) -> np.ndarray:
        """Return the ids of all training samples in the order of one epoch."""
        if epoch not in self._order:
            if len(self._order) > 1:  # a batch spans two epochs at most, unless they are tiny
                self._order.pop(min(self._order))
            shuffler = np.random.default_rng((self.seed, epoch))
            self._order[epoch] = shuffler.permutation(self.num_train)
        return self._order[epoch]

    def for_rank(self, *, global_batch_size: int, rank: int, world_size: int) -> TextRankData:
        """Return the part of one data-parallel rank.

        Args:
            global_batch_size: samples a step over all ranks; needs no common factor with
                `world_size`, the first ranks then hold one row less.
            rank: 0 ... world_size-1.
            world_size: number of data-parallel ranks.

        Raises:
            ValueError: a rank would have no row.
        """
        if not 0 <= rank < world_size <= global_batch_size:
            raise ValueError(
                f"global_batch_size={global_batch_size} cannot be dealt to rank={rank} of "
                f"world_size={world_size}: every rank needs a row; set global_batch_size >= "
                f"{world_size}"
            )
        if 0 < self.num_validation < world_size:
            raise ValueError(
                f"{self.num_validation} validation windows cannot be dealt to world_size="
                f"{world_size} ranks; set validation_fraction=0 or give a longer text"
            )
        return TextRankData(self, global_batch_size, rank, world_size)


@dataclass(frozen=True, slots=True)
class TextRankData:
    """The rows of a `TextData` that one data-parallel rank sees."""

    data: TextData
    global_batch_size: int
    rank: int
    world_size: int

    def sample_ids(self, step: int) -> list[int]:
        """Return the ids of this rank's rows; the ranks' lists in order are the global batch."""
        start, stop = self._slice(self.global_batch_size)
        first = step * self.global_batch_size
        places = range(first + start, first + stop)
        size = self.data.num_train
        return [int(self.data.order(place // size)[place % size]) for place in places]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both (rows, context_length), long: targets are one ahead."""
        return self._rows(self.sample_ids(step))

    @property
    def num_validation_batches(self) -> int:
        """Number of whole validation batches; a short one if the split is smaller than that."""
        available = self.data.num_validation
        return max(available // self.global_batch_size, min(available, 1))

    def validation_batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of a validation batch, shaped as those of `batch`."""
        size = min(self.global_batch_size, self.data.num_validation)
        start, stop = self._slice(size)
        first = self.data.num_train + index * size
        return self._rows(list(range(first + start, first + stop)))

    def _slice(self, size: int) -> tuple[int, int]:
        return self.rank * size // self.world_size, (self.rank + 1) * size // self.world_size

    def _rows(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        rows = self.data.windows[ids]  # (rows, context_length + 1)
        return rows[:, :-1], rows[:, 1:]


def build_tokenizer(text: str, vocab_size: int) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer (GPT-2's scheme) learnt from a text.

    Any text survives encode and decode unchanged. Equal arguments give equal tokenizers.

    Args:
        text: what to learn merges from.
        vocab_size: most ids; the first 256 are the bytes. A short text gives fewer.

    Raises:
        ValueError: `vocab_size` is below 256.
    """
    if vocab_size < 256:
        raise ValueError(f"vocab_size={vocab_size} has no room for the 256 bytes; set >= 256")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def shakespeare() -> str:
    """Return three plays of Shakespeare, 290 KB of public-domain text that comes with nbdist."""
    corpus = resources.files("nbdist.train").joinpath("corpora", "shakespeare.txt")
    return corpus.read_text(encoding="utf-8")
