"""nbdist: distributed PyTorch from a notebook (anywhere).

`%load_ext nbdist` in a notebook, `from nbdist import World` in a script. Importing it loads
neither torch nor Jupyter; the public names below are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.cluster.world import World as World
    from nbdist.notebook.session import current_world as current_world
    from nbdist.notebook.session import generate as generate
    from nbdist.notebook.widgets.generate import GenerateWidget as GenerateWidget

__version__ = "0.1.0"
__all__ = [
    "World",
    "current_world",
    "generate",
    "GenerateWidget",
    "load_ipython_extension",
    "unload_ipython_extension",
    "__version__",
]

_HOMES = {
    "World": "nbdist.cluster.world",
    "current_world": "nbdist.notebook.session",
    "generate": "nbdist.notebook.session",
    "GenerateWidget": "nbdist.notebook.widgets.generate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nbdist' has no attribute {name!r}; it has {__all__}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """Add the magics to a shell; called by `%load_ext nbdist`."""
    from nbdist.notebook.magics import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Stop the world that the shell's magics started; called by `%unload_ext nbdist`."""
    from nbdist.notebook.magics import unload

    unload(shell)
