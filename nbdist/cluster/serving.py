"""`World.serve`: models on the ranks, by a directory or by a name (client)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from nbdist.serve.order import ServeOrder
from nbdist.serve.router import Router
from nbdist.serve.unloading import served_models, unload

if TYPE_CHECKING:
    from nbdist.cluster.result import CellResult
    from nbdist.messages import ModelServed, ModelsUnloaded, RankInfo
    from nbdist.serve.ports import RanksPort

__all__ = ["Serving"]


class Serving:
    """The part of `World` that serves models."""

    infos: list[RankInfo]

    def serve(self, what: str, **order: Any) -> Router:
        """Load a model on ranks, one replica each, and return the way to them.

        Args:
            what: a Hugging Face directory (config.json, tokenizer.json, *.safetensors) that all
                ranks see; with `tokenizer`, the name of a model on the ranks, of which a copy is
                served.
            **order: the other fields of `ServeOrder`, such as `replicas=2`, `tp=2`, `name="small"`,
                `tokenizer="tokenizer"` or `weight_bits=8`.

        Raises:
            ValueError: the order cannot be carried out; no rank was touched.
            RemoteCellError: loading failed on a rank; others may serve already.
        """
        wanted = ServeOrder(what=str(what), **order).checked(len(self.infos))
        self.run(wanted.cell(), range(wanted.num_ranks))
        return Router(cast("RanksPort", self), wanted.name)

    def served(self) -> list[ModelServed]:
        """List what the ranks serve, by model and rank; answers while cells run."""
        return served_models(cast("RanksPort", self))

    def unload(
        self,
        model: str | None = None,
        *,
        now: bool = False,
        timeout_seconds: float | None = None,
    ) -> dict[int, ModelsUnloaded]:
        """End the replicas of a model, or of all; see `nbdist.serve.unloading.unload`."""
        return unload(cast("RanksPort", self), model, now=now, timeout_seconds=timeout_seconds)

    def run(self, source: str, ranks: Sequence[int]) -> CellResult:
        """See `World.run`."""
        raise NotImplementedError
