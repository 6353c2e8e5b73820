"""Numbers of the HTTP server in Prometheus' text form (client; torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from nbdist.messages import EngineStats
    from nbdist.serve.generation import Generation

__all__ = ["Metrics"]

_GAUGES = (
    ("num_running", "requests_running", "Requests in the batch."),
    ("num_waiting", "requests_waiting", "Requests that wait for the batch."),
    ("num_preempted", "preemptions", "Times that a request gave its cache back."),
    ("used_bytes", "cache_used_bytes", "Cache bytes that hold tokens."),
    ("paged_bytes", "cache_paged_bytes", "Cache bytes reserved in blocks."),
    ("contiguous_bytes", "cache_contiguous_bytes", "What full-length slots would reserve."),
    ("capacity_bytes", "cache_capacity_bytes", "Bytes of the cache."),
    ("num_prefix_tokens", "prefix_tokens", "Prompt tokens found in the cache."),
    ("num_drafted", "drafted_tokens", "Tokens guessed ahead."),
    ("num_accepted", "accepted_tokens", "Guesses that held."),
)


class Metrics:
    """Counts what a server answers; a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "nbdist_requests",
            "Ended requests by finish reason.",
            ["finish_reason"],
            registry=self._registry,
        )
        self._refused = Counter(
            "nbdist_refused", "Requests refused because of load.", registry=self._registry
        )
        self._tokens = Counter("nbdist_tokens", "Tokens generated.", registry=self._registry)
        self._first = Histogram(
            "nbdist_first_token_seconds", "Time to the first token.", registry=self._registry
        )
        self._gauges = {
            field: Gauge(f"nbdist_{name}", text, ["rank"], registry=self._registry)
            for field, name, text in _GAUGES
        }

    def refused(self) -> None:
        """Count a request that found every queue full."""
        self._refused.inc()

    def ended(self, generation: Generation) -> None:
        """Count a request that has ended."""
        self._requests.labels(generation.finish_reason).inc()
        self._tokens.inc(generation.num_tokens)
        if generation.first_token_seconds is not None:
            self._first.observe(generation.first_token_seconds)

    def text(self, stats: dict[int, EngineStats]) -> bytes:
        """Return all numbers, with those of the engines by rank."""
        for field, gauge in self._gauges.items():
            gauge.clear()
            for rank, one in stats.items():
                gauge.labels(str(rank)).set(getattr(one, field))
        return generate_latest(self._registry)
