"""Models that nbdist trains and serves out of the box (ranks)."""

from nbdist.train.models.decoder import AttentionCache, DecoderConfig, DecoderLM

__all__ = ["AttentionCache", "DecoderConfig", "DecoderLM"]
