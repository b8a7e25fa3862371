"""Root-mean-square layer norm over the last dim. T rows, D features; the weight may be an fp32
master: it is rounded to x's dtype, so that training has the bits of serving.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import dispatch, recompute
from lockstep.kernels.rms_norm import cpu, reference

__all__ = ["rms_norm"]

_rms_norm = dispatch.define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    reference=reference.rms_norm,
    native=cpu.rms_norm,
    fake=lambda x, weight, eps: torch.empty_like(x),
)
_backward_op = dispatch.define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    reference=reference.rms_norm_backward,
    native=cpu.rms_norm_backward,
    fake=lambda dy, x, weight, eps: (
        torch.empty_like(x),
        x.new_empty(x.shape[1], dtype=torch.float32),
    ),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dx, dw = _backward_op(dy, x, weight, ctx.eps)
    return dx, dw.to(weight.dtype) if ctx.needs_input_grad[1] else None, None


dispatch.autograd("rms_norm", backward=_backward, setup_context=_setup_context)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise each row; the result has x's dtype. Leading dims are kept: (..., D)."""
    y = _rms_norm(x_TD.reshape(-1, x_TD.shape[-1]), weight_D, eps)
    return recompute.can_recompute(y.view(x_TD.shape), rms_norm, x_TD, weight_D, eps)
