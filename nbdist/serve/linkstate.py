"""What a link is like, as measured, and which weights it is good for (anywhere; torch-free)."""

from __future__ import annotations

from typing import Literal

__all__ = ["LinkState"]

_NEWEST = 0.3  # weight of the newest measurement in the running mean
_SMALL_BYTES = 256  # up to it, a message takes a round trip and nothing else


class LinkState:
    """Round trip and bandwidth of a link, and 8 or 4 bits by them.

    The measure is the time that `payload_bytes` would take: round trip + bytes / bandwidth. Above
    `slow_seconds` 4 bits are chosen, below `fast_seconds` 8; between the two the choice stays, so
    that a link that trembles at one limit does not change the weights each time.

    Args:
        payload_bytes: what the link is judged by, such as the size of the edge's 8-bit weights.
        slow_seconds: above it the link is slow.
        fast_seconds: below it the link is fast; at most `slow_seconds`.

    Raises:
        ValueError: the limits do not fit.
    """

    def __init__(self, *, payload_bytes: int, slow_seconds: float, fast_seconds: float) -> None:
        if payload_bytes < 0 or not 0 < fast_seconds <= slow_seconds:
            raise ValueError(
                f"payload_bytes={payload_bytes}, fast_seconds={fast_seconds}, slow_seconds="
                f"{slow_seconds}: give payload_bytes >= 0 and 0 < fast_seconds <= slow_seconds"
            )
        self._payload_bytes = payload_bytes
        self._slow_seconds = slow_seconds
        self._fast_seconds = fast_seconds
        self.round_trip_seconds: float | None = None
        self.seconds_per_byte: float | None = None
        self.is_cut = False
        self._bits: Literal[8, 4] = 8

    @property
    def bits(self) -> Literal[8, 4]:
        """Bits of the weights that the link is good for; 8 until it is measured."""
        return self._bits

    @property
    def payload_seconds(self) -> float | None:
        """Time that `payload_bytes` would take; None until it is measured."""
        if self.round_trip_seconds is None or self.seconds_per_byte is None:
            return None
        return self.round_trip_seconds + self._payload_bytes * self.seconds_per_byte

    def note(self, num_bytes: int, seconds: float) -> None:
        """Take a measurement: so many bytes went over and an answer came after `seconds`.

        A small message measures the round trip, a larger one what its bytes add to that.
        """
        self.is_cut = False
        if num_bytes <= _SMALL_BYTES:
            self.round_trip_seconds = _mean(self.round_trip_seconds, seconds)
        else:
            added = max(0.0, seconds - (self.round_trip_seconds or 0.0))
            self.seconds_per_byte = _mean(self.seconds_per_byte, added / num_bytes)
        taken = self.payload_seconds
        if taken is not None and taken > self._slow_seconds:
            self._bits = 4
        elif taken is not None and taken < self._fast_seconds:
            self._bits = 8

    def note_cut(self) -> None:
        """Nothing came back; until the next measurement the link counts as cut."""
        self.is_cut = True


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else (1 - _NEWEST) * before + _NEWEST * newest
