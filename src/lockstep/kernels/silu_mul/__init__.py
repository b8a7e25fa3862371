"""Gated activation silu(gate) * up, element by element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import dispatch, recompute
from lockstep.kernels.silu_mul import cpu, reference

__all__ = ["silu_mul"]

_silu_mul = dispatch.define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    reference=reference.silu_mul,
    native=cpu.silu_mul,
    fake=lambda gate, up: torch.empty_like(gate),
)
_backward_op = dispatch.define(
    "silu_mul_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    reference=reference.silu_mul_backward,
    native=cpu.silu_mul_backward,
    fake=lambda dy, gate, up: (torch.empty_like(gate), torch.empty_like(up)),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    return _backward_op(dy, *ctx.saved_tensors)


dispatch.autograd("silu_mul", backward=_backward, setup_context=_setup_context)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; both of one shape and dtype, which the result has too."""
    return recompute.can_recompute(_silu_mul(gate, up), silu_mul, gate, up)
