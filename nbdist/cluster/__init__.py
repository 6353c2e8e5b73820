"""Start, attach to, run on, watch and stop a world of ranks (client)."""

from nbdist.cluster.config import WorldConfig
from nbdist.cluster.world import World

__all__ = ["World", "WorldConfig"]
