"""The AdamW update of one tensor, in place, and sums of squares in a fixed order.

Both bound by memory: an update moves 28 bytes a parameter, once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels import dispatch
from lockstep.kernels.adamw import cpu, reference

__all__ = ["Update", "adamw", "sums_of_squares"]

_adamw = dispatch.define(
    "adamw(Tensor(a!) weight, Tensor(b!) mean, Tensor(c!) square, Tensor gradient,"
    " float grad_scale, float decay, float beta1, float beta2, float step_size,"
    " float root_correction2, float eps) -> ()",
    reference=reference.adamw,
    native=cpu.adamw,
    fake=lambda *_: None,
)
_sums_of_squares = dispatch.define(
    "sums_of_squares(Tensor x) -> Tensor",
    reference=reference.sums_of_squares,
    native=cpu.sums_of_squares,
    fake=lambda x: x.new_empty(-(-x.numel() // reference.PIECE), dtype=torch.float64),
)


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one AdamW update does to every tensor it is given: step `step`, counted from 1."""

    rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0
    """Gradients are multiplied by it as they are read: clipping costs no pass of its own."""

    @functools.cached_property
    def factors(self) -> tuple[float, ...]:
        """What the kernels take: grad_scale, decay, betas, step_size, root_correction2, eps."""
        return (
            self.grad_scale,
            1.0 - self.rate * self.weight_decay,
            self.beta1,
            self.beta2,
            self.rate / (1.0 - self.beta1**self.step),
            (1.0 - self.beta2**self.step) ** 0.5,
            self.eps,
        )


def adamw(weight: Tensor, mean: Tensor, square: Tensor, gradient: Tensor, update: Update) -> None:
    """Update fp32 `weight` and its moments in place; all four contiguous and of one shape."""
    with torch.no_grad():
        _adamw(weight, mean, square, gradient, *update.factors)


def sums_of_squares(x: Tensor) -> Tensor:
    """fp64 sums of the squares of each 65,536 elements of a contiguous fp32 tensor."""
    with torch.no_grad():
        return _sums_of_squares(x)
