"""The names a cell finds on a rank (rank)."""

from __future__ import annotations

from typing import Any

from nbdist.rank.binding import Place

__all__ = ["Namespace", "user_names", "user_values"]


def user_values() -> dict[str, Any]:
    """Return what cells on this rank find by name, without IPython's own and private names."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    assert shell is not None, "a rank has a shell before it takes calls"
    hidden, names = shell.user_ns_hidden, shell.user_ns
    return {n: names[n] for n in sorted(names) if n not in hidden and not n.startswith("_")}


def user_names() -> list[str]:
    """Return the names of `user_values`."""
    return list(user_values())


class Namespace:
    """Puts nbdist's names into the user's namespace and never overwrites what the user made.

    Args:
        names: the user's namespace.

    Attributes:
        names: the same.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        self._ours: dict[str, Any] = {}

    def set_place(self, place: Place, device: str) -> None:
        """Set `rank`, `world_size`, `local_rank`, `device` and `nbdist`."""
        import torch

        import nbdist

        self._set("rank", place.rank)
        self._set("world_size", place.world_size)
        self._set("local_rank", place.local_rank)
        self._set("device", torch.device(device))
        self._set("nbdist", nbdist)

    def set_mesh(self, device: str, world_size: int) -> None:
        """Set `mesh`, all ranks along one axis; a mesh belongs to a generation of the group."""
        from torch.distributed.device_mesh import init_device_mesh

        kind = device.partition(":")[0]
        self._set("mesh", init_device_mesh(kind, (world_size,), mesh_dim_names=("dp_shard",)))

    def is_ours(self, name: str) -> bool:
        """Return whether a name holds what nbdist has put there."""
        return name in self._ours and self.names.get(name) is self._ours[name]

    def _set(self, name: str, value: Any) -> None:
        missing = object()
        present = self.names.get(name, missing)
        if present is missing or present is self._ours.get(name, missing):
            self.names[name] = self._ours[name] = value
