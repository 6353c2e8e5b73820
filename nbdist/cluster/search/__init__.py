"""Hyperparameter search over groups of ranks (client)."""

from nbdist.cluster.search.result import SearchResult
from nbdist.cluster.search.run import SearchRun

__all__ = ["SearchResult", "SearchRun"]
