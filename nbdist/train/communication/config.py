"""How gradients travel between data-parallel ranks (ranks)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Compression", "CommunicationConfig"]

Compression = Literal["fp16", "powersgd", "onebit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationConfig:
    """How gradients travel; given to `parallelize`.

    Attributes:
        compression: for `strategy="ddp"`. "fp16" halves the bytes of float32 gradients;
            "powersgd" sends two thin factors of each matrix (arXiv 1905.13727); "onebit" sends
            the signs of Adam's momentum (1-bit Adam, arXiv 2102.02888).
        warmup_steps: steps that send plain gradients before "powersgd" and "onebit" start.
        powersgd_rank: columns of PowerSGD's factors.
        bucket_megabytes: gradients that DDP reduces at once: small ones start early, large ones
            cost fewer calls. None takes DDP's 25. FSDP has one bucket a block.
        prefetch: blocks whose weights FSDP gathers ahead of the running one; None leaves it to
            FSDP: the next block in forward, none asked for in backward.
        local_steps: for `strategy="ddp"`: steps that a rank takes alone, on gradients of its own
            rows, between two meetings (local SGD, DiLoCo: see `LocalSGD`). None reduces
            gradients in every step.
        outer_learning_rate: with `local_steps`, of the step on the mean of the ranks' ways.
        outer_momentum: with `local_steps`, of that step.
    """

    compression: Compression | None = None
    warmup_steps: int = 20
    powersgd_rank: int = 4
    bucket_megabytes: float | None = None
    prefetch: int | None = None
    local_steps: int | None = None
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.compression not in (None, "fp16", "powersgd", "onebit"):
            raise ValueError(
                f"compression={self.compression!r} is unknown; set "
                '"fp16", "powersgd", "onebit" or None'
            )
        # torch refuses PowerSGD in the first two steps, before DDP has built its buckets anew
        if self.warmup_steps < 2 and self.compression in ("powersgd", "onebit"):
            raise ValueError(
                f"warmup_steps={self.warmup_steps} was asked for with compression="
                f"{self.compression!r}, which needs plain gradients first; set warmup_steps >= 2"
            )
        for name, lowest in (("powersgd_rank", 1), ("prefetch", 1), ("local_steps", 1)):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"{name}={value} is below {lowest}; set {name} >= {lowest}")
        if self.local_steps and (self.compression or self.bucket_megabytes):
            raise ValueError(
                f"local_steps={self.local_steps} was asked for with compression="
                f"{self.compression!r} and bucket_megabytes={self.bucket_megabytes}, but then no "
                "gradients travel; leave these two out"
            )
        if self.bucket_megabytes is not None and not self.bucket_megabytes > 0:
            raise ValueError(
                f"bucket_megabytes={self.bucket_megabytes} is not above 0; set it above 0, or None"
            )
        if self.compression == "powersgd" and self.bucket_megabytes is not None:
            raise ValueError(
                f'bucket_megabytes={self.bucket_megabytes} was asked for with "powersgd", whose '
                "steps wait for each other and hang with several buckets; leave bucket_megabytes "
                "out: all gradients are one bucket then"
            )

    def check_strategy(self, strategy: str) -> None:
        """Refuse what a strategy of `parallelize` cannot do.

        Raises:
            ValueError: compression, buckets or local steps without DDP, or prefetch with it.
        """
        ddp = strategy == "ddp"
        wrong = ("prefetch",) if ddp else ("compression", "bucket_megabytes", "local_steps")
        for name in wrong:
            value = getattr(self, name)
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} was asked for with strategy={strategy!r}: it is for "
                    f"{'FSDP' if ddp else 'DDP'} only; leave it out, or set strategy="
                    f"{'zero3' if ddp else 'ddp'!r}"
                )
