"""A matrix times a number: alpha / r of an adapter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import dispatch
from lockstep.kernels.scale import cpu, reference

__all__ = ["scale"]

_scale = dispatch.define(
    "scale(Tensor x, float factor) -> Tensor",
    reference=reference.scale,
    native=cpu.scale,
    fake=lambda x, factor: torch.empty_like(x),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.factor = inputs[1]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    return dy * ctx.factor, None


dispatch.autograd("scale", backward=_backward, setup_context=_setup_context)


def scale(x: Tensor, factor: float) -> Tensor:
    """factor * x in x's dtype."""
    return _scale(x, factor)
