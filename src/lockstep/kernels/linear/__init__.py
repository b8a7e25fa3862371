"""Matrix product with a fixed order of summation: y = x W^T + b.

T rows, K inputs, N outputs. Inputs and packed weight share the compute dtype (fp32 or bf16); sums
are fp32. The weight itself may be an fp32 master: packing rounds it, so trainer and server compute
the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import dispatch, recompute
from lockstep.kernels.linear import cpu, reference
from lockstep.kernels.linear.reference import SEGMENTS

__all__ = ["SEGMENTS", "PackCache", "linear"]

_linear = dispatch.define(
    "linear(Tensor x, Tensor weight, Tensor packed, Tensor? bias, int segments, bool fp32_out)"
    " -> Tensor",
    reference=reference.linear,
    native=cpu.linear,
    fake=lambda x, weight, packed, bias, segments, fp32_out: x.new_empty(
        x.shape[0], weight.shape[0], dtype=torch.float32 if fp32_out else x.dtype
    ),
)
_grad_input = dispatch.define(
    "linear_grad_input(Tensor dy, Tensor weight) -> Tensor",
    reference=reference.linear_grad_input,
    native=cpu.linear_grad_input,
    fake=lambda dy, weight: dy.new_empty(dy.shape[0], weight.shape[1]),
)
_grad_weight = dispatch.define(
    "linear_grad_weight(Tensor dy, Tensor x) -> Tensor",
    reference=reference.linear_grad_weight,
    native=cpu.linear_grad_weight,
    fake=lambda dy, x: dy.new_empty(dy.shape[1], x.shape[1], dtype=torch.float32),
)
_column_sum = dispatch.define(
    "column_sum(Tensor dy) -> Tensor",
    reference=reference.column_sum,
    native=cpu.column_sum,
    fake=lambda dy: dy.new_empty(dy.shape[1], dtype=torch.float32),
)
_pack = dispatch.define(
    "linear_pack(Tensor weight, bool bf16, bool is_kept) -> Tensor",
    reference=reference.pack,
    native=cpu.pack,
    fake=lambda weight, bf16, is_kept: weight.new_empty(
        -(-weight.shape[0] // cpu.PANEL) * cpu.PANEL * (weight.shape[1] + weight.shape[1] % 2),
        dtype=torch.bfloat16 if bf16 else torch.float32,
    ),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _packed, bias, _segments, _fp32_out = inputs
    recompute.save(ctx, x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = recompute.load(ctx)
    dy = dy.to(x.dtype)
    dx = _grad_input(dy, weight) if ctx.needs_input_grad[0] else None
    dw = _grad_weight(dy, x).to(weight.dtype) if ctx.needs_input_grad[1] else None
    db = _column_sum(dy).to(ctx.bias_dtype) if ctx.needs_input_grad[3] else None
    return dx, dw, None, db, None, None


dispatch.autograd("linear", backward=_backward, setup_context=_setup_context)


class PackCache:
    """The packed copy of one weight; made anew when the weight was written to (its version counter
    moved).

    A weight in training is written to after each use, so its copy is not kept: packing is 0.4% of
    a step, and the copies of all weights half the memory of the weights.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._packed: Tensor | None = None

    def get(self, weight_NK: Tensor, dtype: torch.dtype) -> Tensor:
        key = (weight_NK._version, weight_NK.data_ptr(), dtype, dispatch.is_reference_forced())
        if self._packed is not None and key == self._key:
            return self._packed
        is_kept = not (torch.is_grad_enabled() and weight_NK.requires_grad)
        self._packed = None  # frees the old copy first
        with torch.no_grad():
            packed: Tensor = _pack(weight_NK.detach(), dtype == torch.bfloat16, is_kept)
        if is_kept:
            self._packed, self._key = packed, key
        return packed

    def adopt(self, packed: Tensor, weight_NK: Tensor, dtype: torch.dtype) -> None:
        """Take what `get` gave elsewhere for the same weight; `weight_NK` may be on the meta
        device.
        """
        self._packed = packed
        self._key = (weight_NK._version, weight_NK.data_ptr(), dtype, False)


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    packs: PackCache,
    segments: int = 1,
    fp32_out: bool = False,
) -> Tensor:
    """x W^T + b, in x's dtype (or fp32). `segments` = SEGMENTS where tensor parallelism cuts K."""
    packed = packs.get(weight_NK, x_TK.dtype)
    return _linear(x_TK, weight_NK, packed, bias_N, segments, fp32_out)
