"""Runs that survive a rank's death: copies in peers' memory, recovery, verification (ranks)."""

from nbdist.train.survival.survival import NewRank, Survival

__all__ = ["NewRank", "Survival"]
