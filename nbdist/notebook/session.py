"""The world that a notebook works with (client)."""

from __future__ import annotations

from typing import Any

from nbdist.cluster.world import World
from nbdist.errors import NoWorldError

__all__ = ["current_world", "set_world", "generate"]

_world: World | None = None


def current_world() -> World:
    """Return the world that `%distributed start` or `attach` has set.

    Raises:
        NoWorldError: there is none.
    """
    if _world is None or not _world.is_running:
        raise NoWorldError(
            "a running world is needed, but this notebook has none; type "
            "`%distributed start -n 2`, or `%distributed attach` for one that runs already"
        )
    return _world


def set_world(world: World | None) -> None:
    """Make a world the one that the notebook works with."""
    global _world  # noqa: PLW0603 - one notebook, one current world
    _world = world


def generate(prompts: str | list[str], *, model: str = "default", **sampling: Any) -> Any:
    """Continue prompts with a model that the current world serves; see `nbdist.serve.generate`."""
    from nbdist.serve import generate as serve_generate

    return serve_generate(current_world(), prompts, model=model, **sampling)
