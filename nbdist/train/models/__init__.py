"""Models that nbdist trains and serves out of the box (ranks)."""

from nbdist.train.models.decoder import AttentionCache, DecoderConfig, DecoderLM
from nbdist.train.models.moe import MixtureOfExperts, auxiliary_loss

__all__ = ["AttentionCache", "DecoderConfig", "DecoderLM", "MixtureOfExperts", "auxiliary_loss"]
