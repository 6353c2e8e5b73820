"""1-bit Adam: after a warm-up, ranks exchange the signs of momentum (ranks).

Tang et al., arXiv 2102.02888. Three deviations. Weight decay is AdamW's. One step in 32 sends plain
gradients and renews the variance (the idea of 0/1 Adam, arXiv 2202.06009, at even distances). And
momentum is divided by the root of the variance before its signs are taken, which gives all weights
one unit; without it rarely used weights, whose variance is small, would take steps of the size of
the others' momentum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.train.communication.hooks import OneBitState

__all__ = ["OneBitAdamW", "compressed_mean"]

_REFRESH_EVERY = 32  # steps after the warm-up: one of them sends plain gradients
_CHUNK = 512  # weights that share a scale of 32 bits: a sixteenth of a bit each


def compressed_mean(
    local: Tensor, worker_error: Tensor, server_error: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    """Return about the mean over ranks of a tensor, bit-equal on all. Collective over: `group`.

    Each rank compresses its tensor, averages one part of all ranks' and compresses that again
    (the paper's compressed allreduce). What is lost is added to the next call's input.

    Args:
        local: (N,) float32; N a multiple of 512 times the ranks.
        worker_error: (N,), changed in place.
        server_error: (N / ranks,), changed in place.
        group: the default group when None.
    """
    size = dist.get_world_size(group)
    total = local + worker_error
    message = _compress(total)
    worker_error.copy_(total - _decompress(message).flatten())
    received = torch.empty_like(message)
    dist.all_to_all_single(received, message, group=group)
    part = _decompress(received).view(size, -1).mean(0) + server_error
    message = _compress(part)
    server_error.copy_(part - _decompress(message).flatten())
    gathered = message.new_empty(size * len(message), message.shape[1])
    dist.all_gather_single(gathered, message, group=group)
    return _decompress(gathered).flatten()


def _compress(values: Tensor) -> Tensor:
    """(N,) -> (N/512, 68) bytes: 512 signs and the mean size of each chunk."""
    chunks = values.view(-1, _CHUNK)
    signs = (chunks >= 0).view(len(chunks), -1, 8).to(torch.uint8)
    bits = (signs * _places(values.device)).sum(-1, dtype=torch.uint8)
    scales = chunks.abs().mean(1, keepdim=True).view(torch.uint8)
    return torch.cat((bits, scales), dim=1)


def _decompress(message: Tensor) -> Tensor:
    """(C, 68) bytes -> (C, 512)."""
    bits, scales = message[:, : _CHUNK // 8], message[:, _CHUNK // 8 :]
    signs = (bits.unsqueeze(-1) & _places(message.device)).ne(0).flatten(1)
    size = scales.contiguous().view(torch.float32)
    return torch.where(signs, size, -size)


def _places(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


class OneBitAdamW(torch.optim.Optimizer):
    """AdamW whose momentum is reduced by signs once the warm-up of `link` is done.

    Until then it is AdamW over gradients that DDP reduced. Then the variance is frozen, but for one
    step in 32, and `step` is collective over the group of `link`; gradients stay those of one rank,
    and so does their norm. Errors of compression belong to a rank and are no part of `state_dict`:
    see `residuals`.

    Args:
        params: weights or groups of them, all float32.
        link: from `register_hook`, of the DDP that holds the weights.
        lr: learning rate.
        betas: of momentum and variance.
        eps: added to the root of the variance.
        weight_decay: decoupled (arXiv 1711.05101).

    Raises:
        ValueError: a weight is not float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        link: OneBitState,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        wrong = {str(p.dtype) for p in self._weights() if p.dtype != torch.float32}
        if wrong:
            raise ValueError(
                f"1-bit Adam was given weights of {', '.join(sorted(wrong))}; it packs momentum "
                "with scales of float32: keep the weights in float32"
            )
        self.warmup_steps = link.warmup_steps
        self._group = link.group
        self._errors: tuple[Tensor, Tensor] | None = None
        link.optimizer = self

    @property
    def compressing(self) -> bool:
        """Whether the next step sends signs of momentum."""
        state = next(iter(self.state.values()), None)
        done = 0 if state is None else int(state.get("step", 0))
        return done >= self.warmup_steps and (done - self.warmup_steps + 1) % _REFRESH_EVERY != 0

    def residuals(self) -> dict[str, Tensor]:
        """Return this rank's errors of compression, to be saved by rank; {} before any."""
        return dict(zip(("worker", "server"), self._errors or (), strict=False))

    def load_residuals(self, residuals: dict[str, Tensor]) -> None:
        """Take what `residuals` returned on this rank of as many; {} starts from none."""
        self._errors = (residuals["worker"], residuals["server"]) if residuals else None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights; once `compressing`, collective over the data-parallel ranks."""
        compressing = self.compressing
        parts = [self._momentum(group, p, compressing) for group, p in self._pairs()]
        if compressing:
            parts = self._exchange(parts)
        for (group, p), direction in zip(self._pairs(), parts, strict=True):
            state = self.state[p]
            if compressing:  # every rank keeps the momentum that all of them agreed on
                state["exp_avg"].copy_(direction * self._root(group, state))
            p.mul_(1 - group["lr"] * group["weight_decay"])
            correction = 1 - group["betas"][0] ** float(state["step"])
            p.add_(direction, alpha=-group["lr"] / correction)

    def _momentum(self, group: dict[str, Any], p: Tensor, compressing: bool) -> Tensor:
        """Add a gradient to the momentum; return the momentum over the root of the variance."""
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - group["betas"][0])
        if not compressing:
            state["exp_avg_sq"].lerp_(grad.square(), 1 - group["betas"][1])
        momentum: Tensor = state["exp_avg"] / self._root(group, state)
        return momentum

    def _root(self, group: dict[str, Any], state: dict[str, Tensor]) -> Tensor:
        step = int(state["step"])
        refreshed = max(step - self.warmup_steps, 0) // _REFRESH_EVERY
        seen = min(step, self.warmup_steps) + refreshed
        correction = 1 - group["betas"][1] ** seen
        root: Tensor = (state["exp_avg_sq"] / correction).sqrt_().add_(group["eps"])
        return root

    def _exchange(self, parts: list[Tensor]) -> list[Tensor]:
        flat = torch.cat([part.flatten() for part in parts])
        size = dist.get_world_size(self._group)
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % (_CHUNK * size)))
        if self._errors is None:
            self._errors = torch.zeros_like(padded), padded.new_zeros(len(padded) // size)
        mean = compressed_mean(padded, *self._errors, self._group)[: len(flat)]
        pieces = torch.split(mean, [part.numel() for part in parts])
        return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]

    def _pairs(self) -> list[tuple[dict[str, Any], Tensor]]:
        return [(group, p) for group in self.param_groups for p in group["params"]]

    def _weights(self) -> list[Tensor]:
        return [p for _, p in self._pairs()]
