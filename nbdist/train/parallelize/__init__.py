"""Ways to spread a model over a mesh, one file each (ranks)."""

from nbdist.train.parallelize.data import parallelize

__all__ = ["parallelize"]
