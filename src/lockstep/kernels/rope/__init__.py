"""Rotary position embedding. T tokens, N heads, H head dim; tables hold P positions by H/2 angles,
fp32.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.kernels import dispatch
from lockstep.kernels.rope import cpu, reference

__all__ = ["rope"]

_rope = dispatch.define(
    "rope(Tensor x, Tensor positions, Tensor cos, Tensor sin, bool inverse) -> Tensor",
    reference=reference.rope,
    native=cpu.rope,
    fake=lambda x, positions, cos, sin, inverse: x.new_empty(x.shape),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _x, positions, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(positions, cos, sin)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _rope(dy, *ctx.saved_tensors, not ctx.inverse), None, None, None, None


dispatch.autograd("rope", backward=_backward, setup_context=_setup_context)


def rope(x_TNH: Tensor, positions_T: Tensor, cos_PH: Tensor, sin_PH: Tensor) -> Tensor:
    """Rotate each head of each token by its position (int64)."""
    return _rope(x_TNH, positions_T, cos_PH, sin_PH, False)
