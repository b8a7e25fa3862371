"""Matrix product with a fixed order of summation: y = x W^T + b.

T rows, K inputs, N outputs. Inputs and packed weight share the compute dtype (fp32 or bf16), or the
weight is quantised; sums are fp32. The weight itself may be an fp32 master: packing rounds it, so
trainer and server compute the same bits. One product may take several weights, whose outputs lie
side by side, and do what comes before and after it: a norm, a residual sum, a gate. Where gradients
are wanted the separate ops run instead, to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.core.quantization import WeightScheme
from lockstep.kernels import dispatch, native_library, recompute
from lockstep.kernels.linear import cpu, quantized, reference
from lockstep.kernels.linear.formats import QuantizedWeight, quantize_rtn
from lockstep.kernels.linear.packs import (
    PACKED_FIELDS,
    PackCache,
    Packed,
    Weight,
    can_pack_together,
    release,
)
from lockstep.kernels.linear.reference import SEGMENTS
from lockstep.kernels.rms_norm import rms_norm
from lockstep.kernels.silu_mul import silu_mul

__all__ = [
    "PACKED_FIELDS",
    "SEGMENTS",
    "Norm",
    "PackCache",
    "Packed",
    "QuantizedWeight",
    "Weight",
    "can_pack_together",
    "gated_linear",
    "is_fused",
    "linear",
    "quantize_rtn",
    "release",
    "runs_natively",
]


@dataclass(frozen=True)
class Norm:
    """An RMS norm of the rows before a product."""

    weight_K: Tensor
    eps: float


def _native_linear(
    x_TK: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    packed: Tensor,
    packed_bias: Tensor | None,
    segments: int,
    fp32_out: bool,
) -> Tensor:
    return cpu.gemm(
        x_TK,
        packed,
        sum(weight.shape[0] for weight in weights),
        column_bias=packed_bias,
        segments=segments,
        out_dtype=torch.float32 if fp32_out else x_TK.dtype,
    )


_linear = dispatch.define(
    "linear(Tensor x, Tensor[] weights, Tensor[] biases, Tensor packed, Tensor? packed_bias,"
    " int segments, bool fp32_out) -> Tensor",
    reference=reference.linear,
    native=_native_linear,
    fake=lambda x, weights, biases, packed, packed_bias, segments, fp32_out: x.new_empty(
        x.shape[0],
        sum(weight.shape[0] for weight in weights),
        dtype=torch.float32 if fp32_out else x.dtype,
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
_quantized = dispatch.define(
    "quantized_linear(Tensor x, Tensor[] masters, Tensor[] biases, Tensor[] parts, Tensor packed,"
    " Tensor? packed_bias, str scheme, int segments, bool fp32_out) -> Tensor",
    reference=quantized.reference_linear,
    native=quantized.native_linear,
    fake=lambda x, masters, biases, parts, packed, packed_bias, scheme, segments, fp32_out: (
        x.new_empty(x.shape[0], parts[0].shape[0], dtype=torch.float32 if fp32_out else x.dtype)
    ),
)


def _grads(
    ctx: Any, dy: Tensor, x: Tensor, whole_NK: Tensor | None
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Of x, each weight and each bias; `whole_NK` is all weights as one, None if x needs none."""
    dx = None if whole_NK is None else _grad_input(dy, whole_NK)
    dws: list[Tensor | None] = [None] * len(ctx.weight_dtypes)
    if any(ctx.needs_input_grad[1]):
        rows = _grad_weight(dy, x).split(ctx.sizes)
        dws = [d.to(t) for d, t in zip(rows, ctx.weight_dtypes, strict=True)]
    dbs: list[Tensor | None] = [None] * len(ctx.bias_dtypes)
    if any(ctx.needs_input_grad[2]):
        sums = _column_sum(dy).split(ctx.sizes)
        dbs = [d.to(t) for d, t in zip(sums, ctx.bias_dtypes, strict=True)]
    return dx, dws, dbs


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, biases = inputs[:3]
    recompute.save(ctx, x, *weights)
    ctx.sizes = [weight.shape[0] for weight in weights]
    ctx.weight_dtypes, ctx.bias_dtypes = [w.dtype for w in weights], [b.dtype for b in biases]


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, *weights = recompute.load(ctx)
    whole = None
    if ctx.needs_input_grad[0]:
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
    return *_grads(ctx, dy.to(x.dtype), x, whole), None, None, None, None


def _quantized_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, masters, biases, parts, _packed, _bias, scheme = inputs[:7]
    recompute.save(ctx, x, *parts)
    ctx.scheme = scheme
    sized = masters or biases
    ctx.sizes = [tensor.shape[0] for tensor in sized]
    ctx.weight_dtypes, ctx.bias_dtypes = [w.dtype for w in masters], [b.dtype for b in biases]


def _quantized_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Straight through: the weight counts as its dequantised values, rounding as the identity."""
    x, *parts = recompute.load(ctx)
    whole = None
    if ctx.needs_input_grad[0]:
        whole = quantized.from_parts(parts, ctx.scheme).dequantize(x.dtype)
    grads = _grads(ctx, dy.to(x.dtype), x, whole)
    return *grads, [None] * len(parts), None, None, None, None, None


dispatch.autograd("linear", backward=_backward, setup_context=_setup_context)
dispatch.autograd(
    "quantized_linear", backward=_quantized_backward, setup_context=_quantized_setup_context
)


def linear(
    x_TK: Tensor,
    weights: Weight | Sequence[Weight],
    biases: Tensor | Sequence[Tensor] | None = None,
    *,
    packs: PackCache,
    scheme: WeightScheme | None = None,
    norm: Norm | None = None,
    residual_TN: Tensor | None = None,
    segments: int = 1,
    fp32_out: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """norm?(x) W^T + b [+ residual] in x's dtype (or fp32), the outputs of several weights side by
    side.

    `scheme` rounds float weights on the fly, gradients going straight through. `segments` =
    SEGMENTS where tensor parallelism cuts K. Weights of one product share a format. `out` (T, N)
    is written to where products are fused (`is_fused`), and must not be given elsewhere.
    """
    group = [weights] if isinstance(weights, Tensor | QuantizedWeight) else list(weights)
    added = [] if biases is None else [biases] if isinstance(biases, Tensor) else list(biases)
    packed = packs.get(
        group,
        x_TK.dtype,
        biases=added,
        norm_weight=None if norm is None else norm.weight_K,
        scheme=scheme,
    )
    if is_fused(x_TK):
        return cpu.gemm(
            x_TK,
            packed.data,
            packed.num_outputs,
            fmt=packed.format,
            column_bias=packed.bias,
            norm_weight_K=packed.norm_weight,
            eps=0.0 if norm is None else norm.eps,
            residual_TN=residual_TN,
            segments=segments,
            out=out,
            out_dtype=torch.float32 if fp32_out else x_TK.dtype,
        )
    assert out is None, "an output to write to needs the fused path"
    if norm is not None:
        x_TK = rms_norm(x_TK, norm.weight_K, norm.eps)
    floats = [weight for weight in group if isinstance(weight, Tensor)]
    if packed.quantized is None:
        y_TN = _linear(x_TK, floats, added, packed.data, packed.bias, segments, fp32_out)
    else:
        parts = list(packed.quantized.tensors().values())
        name = packed.quantized.scheme.name
        y_TN = _quantized(
            x_TK, floats, added, parts, packed.data, packed.bias, name, segments, fp32_out
        )
    return y_TN if residual_TN is None else residual_TN + y_TN


def gated_linear(
    x_TK: Tensor,
    gate: Weight,
    up: Weight,
    biases: Sequence[Tensor] = (),
    *,
    packs: PackCache,
    gate_packs: PackCache,
    up_packs: PackCache,
    scheme: WeightScheme | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """silu(norm?(x) Wg^T + bg) * (norm?(x) Wu^T + bu), (T, N).

    `packs`, interleaved, are for one product without gradients; the others for two with them, or
    where gate and up are of different formats.
    """
    if is_fused(x_TK) and can_pack_together([gate, up]):
        packed = packs.get(
            [gate, up],
            x_TK.dtype,
            biases=biases,
            norm_weight=None if norm is None else norm.weight_K,
            scheme=scheme,
        )
        return cpu.gemm(
            x_TK,
            packed.data,
            packed.num_outputs,
            fmt=packed.format,
            column_bias=packed.bias,
            norm_weight_K=packed.norm_weight,
            eps=0.0 if norm is None else norm.eps,
            silu_mul=True,
        )
    if norm is not None:
        x_TK = rms_norm(x_TK, norm.weight_K, norm.eps)
    gate_bias, up_bias = biases or (None, None)
    return silu_mul(
        linear(x_TK, gate, gate_bias, packs=gate_packs, scheme=scheme),
        linear(x_TK, up, up_bias, packs=up_packs, scheme=scheme),
    )


def is_fused(x: Tensor) -> bool:
    """Whether products of `x` do norm, residual and gate in one native call."""
    return x.dtype in native_library.DTYPE_CODE and runs_natively(x)


def runs_natively(x: Tensor) -> bool:
    """Whether a step with this input may call native kernels without torch between."""
    return (
        dispatch.is_plain(x)
        and not dispatch.is_reference_forced()
        and native_library.missing_reason() is None
    )
