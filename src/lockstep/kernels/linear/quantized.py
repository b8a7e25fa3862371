"""Both implementations of `lockstep::quantized_linear`, on the flat tensors that an op may take.

`parts` are the tensors of one `QuantizedWeight` in the order of its fields; which there are follows
from the scheme.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.core.quantization import WeightScheme, parse_scheme
from lockstep.kernels.linear import cpu, quantized_reference
from lockstep.kernels.linear.formats import QuantizedWeight
from lockstep.kernels.linear.packs import format_of_weight


def from_parts(parts: Sequence[Tensor], scheme: str) -> QuantizedWeight:
    """The weight that `list(weight.tensors().values())` came from."""
    parsed = parse_scheme(scheme)
    return QuantizedWeight(scheme=parsed, **dict(zip(_fields(parsed), parts, strict=True)))


def _fields(scheme: WeightScheme) -> list[str]:
    has_minimums, is_two_level = scheme.offset != "symmetric", scheme.super_group_size is not None
    present = {
        "values_NK": True,
        "scales_NG": True,
        "minimums_NG": has_minimums,
        "super_scales_NS": is_two_level,
        "super_minimums_NS": is_two_level and has_minimums,
    }
    return [name for name, is_there in present.items() if is_there]


def reference_linear(
    x_TK: Tensor,
    masters: list[Tensor],
    biases: list[Tensor],
    parts: list[Tensor],
    packed: Tensor,
    packed_bias: Tensor | None,
    scheme: str,
    segments: int,
    fp32_out: bool,
) -> Tensor:
    bias_N = torch.cat([bias.to(x_TK.dtype).float() for bias in biases]) if biases else None
    y_TN = quantized_reference.linear(x_TK, from_parts(parts, scheme), bias_N, segments)
    return y_TN if fp32_out else y_TN.to(x_TK.dtype)


def native_linear(
    x_TK: Tensor,
    masters: list[Tensor],
    biases: list[Tensor],
    parts: list[Tensor],
    packed: Tensor,
    packed_bias: Tensor | None,
    scheme: str,
    segments: int,
    fp32_out: bool,
) -> Tensor:
    weight = from_parts(parts, scheme)
    return cpu.gemm(
        x_TK,
        packed,
        weight.shape[0],
        fmt=format_of_weight(weight),
        column_bias=packed_bias,
        segments=segments,
        out_dtype=torch.float32 if fp32_out else x_TK.dtype,
    )
