"""Continue some prompts in one call (client; torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.serve.router import Router

if TYPE_CHECKING:
    from nbdist.serve.generation import Generation
    from nbdist.serve.ports import RanksPort

__all__ = ["generate"]


def generate(
    ranks: RanksPort, prompts: str | list[str], *, model: str = "default", **sampling: Any
) -> list[Generation]:
    """Continue prompts with a model that ranks serve, and wait for all answers.

    Returns:
        One ended `Generation` a prompt, in the order of the prompts; see `Router.generate`.
    """
    router = Router(ranks, model)
    try:
        return router.generate(prompts, **sampling)
    finally:
        router.close()
