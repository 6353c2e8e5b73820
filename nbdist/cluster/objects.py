"""Functions and values between client and ranks, over ipyparallel (client)."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import traitlets.log

from nbdist import bulk
from nbdist.cluster.bulk import is_on_one_host, transfer_directories
from nbdist.errors import NbdistError, RemoteCellError
from nbdist.messages import RankInfo
from nbdist.runfiles import WorldRecord

__all__ = ["Objects"]

CONNECT_SECONDS = 20.0


class Objects:
    """An ipyparallel client, connected when first needed.

    Args:
        record: of the world; the profile in its directory holds the connection file.
        infos: returns who the ranks are.
    """

    def __init__(self, record: WorldRecord, infos: Callable[[], list[RankInfo]]) -> None:
        self._record = record
        self._file = Path(record.directory, "profile", "security", "ipcontroller-client.json")
        self._infos = infos
        self._client: Any = None
        self._lock = threading.Lock()
        self._pushed: dict[int, dict[str, Any]] = {}

    def apply(
        self, fn: Callable[..., Any], args: tuple[Any, ...], ranks: Sequence[int], **named: Any
    ) -> list[Any]:
        """Call a function on ranks; results in rank order."""
        return self._results(self._view(ranks).apply_async(fn, *args, **named), ranks)

    def submit(self, fn: Callable[..., Any], args: tuple[Any, ...], rank: int) -> Any:
        """Call a function on one rank and return at once, with a future for `result`."""
        return self._view([rank]).apply_async(fn, *args)

    def result(self, answer: Any, rank: int) -> Any:
        """Return what a submitted call has returned; raises RemoteCellError."""
        return self._results(answer, [rank])[0]

    def push(self, values: dict[str, Any], ranks: Sequence[int]) -> None:
        """Set names on ranks; large tensors and arrays go through one file.

        The values are remembered by reference, for `push_again`.
        """
        if not is_on_one_host(self._infos()):
            self._results(self._view(ranks).push(values, block=False), ranks)
        else:
            with transfer_directories(self._record) as directories:
                stream, path = bulk.pack(values, directories, "client")
                self.apply(bulk.set_names, (stream, path), ranks)
        for rank in ranks:
            self._pushed.setdefault(rank, {}).update(values)

    def relabel(self, moves: dict[int, int], ranks: Sequence[int], new: Sequence[int]) -> None:
        """Know ranks by other numbers; new ones have the names of the first that is not.

        Args:
            moves: `{old: new}`.
            ranks: all there are now.
            new: those whose process is new.
        """
        pushed = {moves.get(rank, rank): names for rank, names in self._pushed.items()}
        first = next((rank for rank in ranks if rank not in new), -1)
        pushed |= {rank: dict(pushed.get(first, {})) for rank in new}
        self._pushed = {rank: names for rank, names in pushed.items() if rank in ranks}

    def push_again(self, rank: int) -> list[str]:
        """Set on a new process of a rank what was pushed to the old one; return the names."""
        if names := self._pushed.get(rank, {}):
            self.push(names, [rank])
        return sorted(names)

    def pull(self, name: str, ranks: Sequence[int]) -> dict[int, object]:
        """Return the value of a name by rank; large tensors and arrays go through files."""
        if not is_on_one_host(self._infos()):
            values = self._results(self._view(ranks).pull(name, block=False), ranks)
            return dict(zip(ranks, values, strict=True))
        pulled: dict[int, object] = {}
        with transfer_directories(self._record) as directories:
            packed = self.apply(bulk.pack_name, (name, directories, "rank"), ranks)
            for rank, (stream, path) in zip(ranks, packed, strict=True):
                pulled[rank] = bulk.unpack(bytes(stream), path, on_rank=False)
                if path:
                    Path(path).unlink()
        return pulled

    def close(self) -> None:
        """Disconnect."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _engine_ids(self) -> dict[int, int]:
        return {info.rank: info.engine_id for info in self._infos()}

    def _view(self, ranks: Sequence[int]) -> Any:
        engine_ids = self._engine_ids()
        wanted = [engine_ids[rank] for rank in ranks]
        view = self._connected(set(wanted))[wanted]
        # cloudpickle carries lambdas, closures and classes that were defined in a notebook.
        view.use_cloudpickle()
        return view

    def _connected(self, wanted: set[int]) -> Any:
        import ipyparallel

        with self._lock:
            if self._client is None:
                with _without_signing_advice():
                    self._client = ipyparallel.Client(str(self._file))
            deadline = time.monotonic() + CONNECT_SECONDS
            while not wanted <= set(self._client.ids):
                if time.monotonic() > deadline:
                    raise NbdistError(
                        f"engines {sorted(wanted)} were expected, but the controller knows "
                        f"{self._client.ids}; `%distributed stop`, then `%distributed start`"
                    )
                time.sleep(0.02)
            return self._client

    def _results(self, answer: Any, ranks: Sequence[int]) -> list[Any]:
        from ipyparallel import CompositeError, RemoteError

        try:
            values = answer.get()
        except CompositeError as error:
            by_engine = {v: k for k, v in self._engine_ids().items()}
            found = [(by_engine[e[3]["engine_id"]], e[0], e[1], e[2]) for e in error.elist]
            first = found[0]
            others = {rank: f"raised {name}: {value}" for rank, name, value, _ in found[1:]}
            raise RemoteCellError(first[0], first[1], first[2], _text(first[3]), others) from None
        except RemoteError as error:
            raise RemoteCellError(
                ranks[0], error.ename, error.evalue, _text(error.traceback)
            ) from None
        return list(values) if isinstance(values, list) else [values]


@contextlib.contextmanager
def _without_signing_advice() -> Iterator[None]:
    """Drop jupyter_client's warning that messages are not signed: CURVE authenticates them."""
    logger = traitlets.log.get_logger()
    if isinstance(logger, logging.LoggerAdapter):
        logger = logger.logger
    advice = lambda record: "signing is disabled" not in record.getMessage()  # noqa: E731
    logger.addFilter(advice)
    try:
        yield
    finally:
        logger.removeFilter(advice)


def _text(traceback: Any) -> str:
    return traceback if isinstance(traceback, str) else "\n".join(traceback or [])
