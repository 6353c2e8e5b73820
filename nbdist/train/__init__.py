"""Sharded training (ranks): mesh, data, trainer, checkpoints; knows no notebook."""

from nbdist.train.asynchronous import AsyncHistory, train_asynchronously
from nbdist.train.communication import CommunicationConfig, WireCounter
from nbdist.train.config import TrainConfig, next_token_loss
from nbdist.train.data import TextData, build_tokenizer, shakespeare
from nbdist.train.empty import empty_weights
from nbdist.train.export import export
from nbdist.train.hosts import rank0_first
from nbdist.train.learning_rate import scale_learning_rate
from nbdist.train.manifest import latest, list_checkpoints, verify
from nbdist.train.mapdata import MapData
from nbdist.train.mesh import MeshConfig, build_mesh
from nbdist.train.metrics import StepRecord, TrainHistory
from nbdist.train.models import DecoderConfig, DecoderLM, MixtureOfExperts
from nbdist.train.overlap import OverlapReport, overlap_report
from nbdist.train.parallelize import PipelineConfig, parallelize, schedule_grid
from nbdist.train.pretrained import load_pretrained
from nbdist.train.saving import CheckpointConfig
from nbdist.train.trainer import Trainer

__all__ = [
    "DecoderConfig",
    "DecoderLM",
    "MixtureOfExperts",
    "TextData",
    "MapData",
    "rank0_first",
    "build_tokenizer",
    "shakespeare",
    "MeshConfig",
    "build_mesh",
    "parallelize",
    "CommunicationConfig",
    "WireCounter",
    "overlap_report",
    "OverlapReport",
    "scale_learning_rate",
    "PipelineConfig",
    "schedule_grid",
    "TrainConfig",
    "Trainer",
    "TrainHistory",
    "StepRecord",
    "train_asynchronously",
    "AsyncHistory",
    "next_token_loss",
    "CheckpointConfig",
    "latest",
    "list_checkpoints",
    "verify",
    "empty_weights",
    "export",
    "load_pretrained",
]
