"""Any `nn.Module` behind a window: single items in, one forward for many, single answers (rank)."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nbdist.errors import Overloaded, ServeError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["BatchedModule"]


@dataclass(slots=True)
class _Item:
    padded: Tensor
    future: Future[Any] = field(default_factory=Future)


class BatchedModule:
    """Joins calls that come close together into one forward of a module.

    A thread waits for the first item, then at most `window_seconds` for more, and runs those of
    one shape and dtype together. When a forward raises, its items are run one by one: a bad item
    fails alone. Every item's future gets exactly one ending.

    Args:
        module: maps (B, ...) to a tensor, or to a tuple or dictionary of tensors, that begin
            with B. It is used as it is; it should be in eval mode.
        max_batch: most items of a forward.
        window_seconds: how long the first item waits for others.
        max_waiting: most items that wait; more are refused.
        buckets: lengths of an item's first dimension; an item is padded with `pad_value` to the
            next one, so that lengths share a forward. The answer keeps the padded length. None
            joins equal shapes only.
        pad_value: what fills the padding.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        max_batch: int = 32,
        window_seconds: float = 0.005,
        max_waiting: int = 1024,
        buckets: tuple[int, ...] | None = None,
        pad_value: float = 0,
    ) -> None:
        if max_batch < 1 or window_seconds < 0 or max_waiting < 1:
            raise ValueError(
                f"max_batch={max_batch}, window_seconds={window_seconds}, max_waiting="
                f"{max_waiting}: set max_batch and max_waiting >= 1 and window_seconds >= 0"
            )
        self._module = module
        self._max_batch = max_batch
        self._window_seconds = window_seconds
        self._max_waiting = max_waiting
        self._buckets = tuple(sorted(buckets)) if buckets else None
        self._pad_value = pad_value
        self._device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._inbox: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = True
        self.num_items = 0
        self.num_batches = 0
        self._thread = threading.Thread(target=self._run, name="nbdist-batched", daemon=True)
        self._thread.start()

    def __call__(self, item: Tensor, timeout_seconds: float | None = None) -> Any:
        """Return the module's answer for one item, without the batch dimension.

        Raises:
            TimeoutError: it has not come in this time.
        """
        return self.submit(item).result(timeout_seconds)

    @property
    def mean_batch_size(self) -> float:
        """Items of a forward, on average; 0 before the first."""
        return self.num_items / self.num_batches if self.num_batches else 0.0

    def submit(self, item: Tensor) -> Future[Any]:
        """Take an item and return the future of its answer; never blocks.

        Raises:
            ServeError: it has been closed.
            Overloaded: `max_waiting` items wait already.
            ValueError: the item is longer than the largest bucket.
        """
        made = _Item(self._pad(item))
        with self._lock:
            if not self._open:
                raise ServeError("this `BatchedModule` was closed; make a new one")
            if (depth := self._inbox.qsize()) >= self._max_waiting:
                raise Overloaded(
                    f"{depth} items wait, and at most max_waiting={self._max_waiting} may; send "
                    "the item again when some have ended",
                    depth=depth,
                    limit=self._max_waiting,
                )
            self._inbox.put(made)
        return made.future

    def close(self) -> None:
        """Answer what was sent before, then end the thread."""
        with self._lock:
            if self._open:
                self._open = False
                self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        left: dict[Any, list[_Item]] = {}
        more = True
        while more or left:
            if more:
                more = self._gather(left)
            if left:
                key = next(iter(left))
                batch, rest = left[key][: self._max_batch], left[key][self._max_batch :]
                del left[key]
                if rest:
                    left[key] = rest
                self._answer([item for item in batch if item.future.set_running_or_notify_cancel()])

    def _gather(self, left: dict[Any, list[_Item]]) -> bool:
        """Put items into `left` by shape until a batch is full or the window ends; False at close.

        Items that are left over from the last time do not wait again.
        """
        ends = 0.0 if left else None
        while True:
            try:
                if ends is None:
                    item = self._inbox.get()
                    ends = time.monotonic() + self._window_seconds
                else:
                    item = self._inbox.get(timeout=max(0.0, ends - time.monotonic()) or 1e-9)
            except queue.Empty:
                return True
            if item is None:
                return False
            same = left.setdefault((item.padded.shape, item.padded.dtype), [])
            same.append(item)
            if len(same) >= self._max_batch:
                return True

    @torch.inference_mode()
    def _answer(self, items: list[_Item]) -> None:
        if not items:
            return
        try:
            batch = torch.stack([item.padded for item in items]).to(self._device)
            made = self._module(batch)
            answers = [_pick(made, at, len(items)) for at in range(len(items))]
        except Exception as error:  # noqa: BLE001 - becomes the items' ending
            if len(items) == 1:
                items[0].future.set_exception(error)
                return
            for item in items:
                self._answer([item])
            return
        self.num_items += len(items)
        self.num_batches += 1
        for item, answer in zip(items, answers, strict=True):
            item.future.set_result(answer)

    def _pad(self, item: Tensor) -> Tensor:
        if self._buckets is None:
            return item
        fits = [size for size in self._buckets if size >= len(item)]
        if not fits:
            raise ValueError(
                f"the item has length {len(item)}, and the largest bucket is {self._buckets[-1]}; "
                "shorten it, or give a larger bucket"
            )
        padded = item.new_full((fits[0], *item.shape[1:]), self._pad_value)
        padded[: len(item)] = item
        return padded


def _pick(made: Any, at: int, size: int) -> Any:
    """Return one item's part of an answer."""
    if isinstance(made, Tensor):
        if made.shape[:1] != (size,):
            raise ServeError(
                f"the module gave shape {tuple(made.shape)} for {size} items; its answer must "
                "begin with the batch dimension"
            )
        return made[at]
    if isinstance(made, dict):
        return {name: _pick(part, at, size) for name, part in made.items()}
    if isinstance(made, tuple | list):
        return type(made)(_pick(part, at, size) for part in made)
    raise ServeError(
        f"the module gave a {type(made).__name__}; a tensor, tuple, list or dictionary of tensors "
        "can be split into items"
    )
