"""A small model at the edge, a large one at the centre: who answers (rank; needs torch).

The edge answers what it is sure of and forwards the rest. Both sides know nothing of how they are
connected: `Centre` is the far side, and what stands for it at the edge raises `ConnectionError`
when the link is cut.
"""

from __future__ import annotations

import hashlib
import time
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from nbdist.errors import ServeError
from nbdist.serve.calibration import confidence, fit_temperature
from nbdist.serve.quantise import quantise

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.serve.linkstate import LinkState
    from nbdist.serve.quantise import Bits

__all__ = [
    "Cascade",
    "CascadeAnswer",
    "Centre",
    "CentrePort",
    "EdgeModel",
    "VersionMismatchError",
    "weights_version",
]

_PROBE_BYTES = 16 * 1024


class VersionMismatchError(ServeError):
    """A request came from an edge whose weights are not those that the centre has released."""


@dataclass(frozen=True, slots=True)
class EdgeModel:
    """What the centre releases to an edge.

    Attributes:
        model: in eval mode; logits (1, C) or (1, S, C) of one item, the last place counts.
        temperature: of its confidence, fitted for these bits.
        version: of the whole weights that it was made of; see `weights_version`.
    """

    model: torch.nn.Module
    temperature: float
    version: str


@dataclass(frozen=True, slots=True)
class CascadeAnswer:
    """An answer and where it comes from.

    Attributes:
        label: the class or token.
        source: `edge` when it was sure, `centre`, or `fallback`: the edge was not sure, and the
            link was cut.
        confidence: of the edge, calibrated.
        bits: of the edge's weights.
        seconds: from the question to the answer.
    """

    label: int
    source: Literal["edge", "centre", "fallback"]
    confidence: float
    bits: int
    seconds: float


class CentrePort(Protocol):
    """The centre, as an edge sees it; every call may raise `ConnectionError`."""

    def answer(self, item: torch.Tensor, version: str) -> int:
        """Answer for an edge of this version; see `Centre.answer`."""
        ...

    def release(self, bits: Bits) -> EdgeModel:
        """Return the edge's weights; see `Centre.release`."""
        ...

    def echo(self, num_bytes: int) -> None:
        """Take so many bytes and answer at once."""
        ...


class Centre:
    """The far side: the large model, and the small one that edges may have.

    Args:
        model: answers; logits as those of `EdgeModel.model`.
        edge_model: the small model, whole; not changed.
        items: (N, ...) held-out items that the edge's confidence is calibrated with.
        labels: (N,) the right answers.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        edge_model: torch.nn.Module,
        items: torch.Tensor,
        labels: torch.Tensor,
    ) -> None:
        self._model = model
        self._held_out = (items, labels)
        self._released: dict[int, EdgeModel] = {}
        self.update(edge_model)

    def update(self, edge_model: torch.nn.Module) -> None:
        """Release new weights: edges with others are refused from here on."""
        self._edge_model = edge_model
        self.version = weights_version(edge_model)
        self._released.clear()

    def answer(self, item: torch.Tensor, version: str) -> int:
        """Answer an item (no batch dimension) for an edge of this version.

        Raises:
            VersionMismatchError: the edge has other weights.
        """
        if version != self.version:
            raise VersionMismatchError(
                f"the edge has weights {version[:8]}, and the centre has released "
                f"{self.version[:8]}; take the new ones with `release`"
            )
        return int(logits_of(self._model, item[None])[0].argmax())

    def release(self, bits: Bits) -> EdgeModel:
        """Return the small model in 8 or 4 bits, with the temperature fitted for them."""
        if bits not in self._released:
            model = quantise(deepcopy(self._edge_model), bits).eval()
            items, labels = self._held_out
            temperature = fit_temperature(logits_of(model, items), labels)
            self._released[bits] = EdgeModel(model, temperature, self.version)
        return self._released[bits]

    def echo(self, num_bytes: int) -> None:
        """Answer a probe; the way here and back is what it measures."""


class Cascade:
    """The near side: answers what it is sure of, and forwards the rest.

    One thread calls it.

    Args:
        centre: the far side.
        link: judges the link; `probe` feeds it.
        threshold: least calibrated confidence of an answer that is not forwarded.
        clock: monotonic seconds.

    Raises:
        ConnectionError: the first weights could not be taken.
        ValueError: `threshold` is out of its range.
    """

    def __init__(
        self,
        centre: CentrePort,
        link: LinkState,
        *,
        threshold: float = 0.9,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(
                f"threshold={threshold} is no probability; give 0 (never forward) to 1 (forward "
                "all that is not certain)"
            )
        self.link = link
        self.num_updates = 0
        self._centre = centre
        self._threshold = threshold
        self._clock = clock
        self.probe()
        self._bits: Bits = link.bits
        self._edge = centre.release(self._bits)

    @property
    def version(self) -> str:
        """Of the edge's weights."""
        return self._edge.version

    def probe(self) -> None:
        """Measure the link; off the way of the answers, now and then, and to find it mended."""
        try:
            for num_bytes in (0, _PROBE_BYTES):
                began = self._clock()
                self._centre.echo(num_bytes)
                self.link.note(num_bytes, self._clock() - began)
        except ConnectionError:
            self.link.note_cut()

    def adapt(self) -> None:
        """Take the weights that the link is good for, when they are others than the edge has."""
        if self.link.bits != self._bits and not self.link.is_cut:
            self._update()

    def answer(self, item: torch.Tensor) -> CascadeAnswer:
        """Answer an item (no batch dimension); a refused version is updated and asked once more.

        Raises:
            ServeError: the centre released other weights again in between.
        """
        began = self._clock()
        for _ in range(2):
            label, sure = self._local(item)
            if sure >= self._threshold:
                return self._made(label, "edge", sure, began)
            if self.link.is_cut:
                return self._made(label, "fallback", sure, began)
            try:
                best = self._centre.answer(item, self._edge.version)
                return self._made(best, "centre", sure, began)
            except VersionMismatchError:
                self._update()
            except ConnectionError:
                self.link.note_cut()
                return self._made(label, "fallback", sure, began)
        raise ServeError(
            "the centre released other weights twice during one answer; ask again when it is done"
        )

    def _update(self) -> None:
        bits = self.link.bits
        try:
            self._edge = self._centre.release(bits)
        except ConnectionError:
            self.link.note_cut()
            return
        self._bits = bits
        self.num_updates += 1

    def _local(self, item: torch.Tensor) -> tuple[int, float]:
        logits = logits_of(self._edge.model, item[None])[0]
        return int(logits.argmax()), float(confidence(logits, self._edge.temperature))

    def _made(
        self, label: int, source: Literal["edge", "centre", "fallback"], sure: float, began: float
    ) -> CascadeAnswer:
        return CascadeAnswer(label, source, sure, self._bits, self._clock() - began)


@torch.inference_mode()
def logits_of(model: torch.nn.Module, items: torch.Tensor) -> torch.Tensor:
    """Return the logits (N, C) of items (N, ...); of a sequence, those of its last place."""
    logits: torch.Tensor = model(items)
    return logits[:, -1] if logits.dim() == 3 else logits


def weights_version(model: torch.nn.Module) -> str:
    """Return a digest of names, types, shapes and values: equal weights, equal version."""
    made = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        made.update(memoryview(data.numpy()))
    return made.hexdigest()
