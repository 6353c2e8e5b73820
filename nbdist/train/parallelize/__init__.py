"""Ways to spread a model over a mesh, one file each (ranks)."""

from nbdist.train.parallelize.api import mesh_of, parallelize
from nbdist.train.parallelize.data import last_micro_batch
from nbdist.train.parallelize.loss import loss_context, whole
from nbdist.train.parallelize.pipeline import PipelineConfig
from nbdist.train.parallelize.record import Applied, applied_to, bare
from nbdist.train.parallelize.schedule import schedule_grid

__all__ = [
    "Applied",
    "PipelineConfig",
    "applied_to",
    "bare",
    "last_micro_batch",
    "loss_context",
    "mesh_of",
    "parallelize",
    "schedule_grid",
    "whole",
]
