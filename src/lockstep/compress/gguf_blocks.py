"""Quantised weights as the blocks of GGUF's types, without rounding codes again.

| held as | written as |
|---|---|
| q8_0, q4_0, q4_1 | itself |
| int8 (one scale a channel) | Q8_0, each block with its channel's scale |
| int4, groups of 32, symmetric | Q4_0 |
| int4, groups of 32, zero points | Q4_1, minimum = -scale * zero point |

A block is 32 codes after its fp16 scale (and minimum); 4-bit codes i and i + 16 share a byte.
Scales that lie in bf16 as well as in fp16 stay the same, minimums are rounded to fp16's 11 bits.
Layouts: ggml-common.h of https://github.com/ggml-org/ggml. Legend: N rows, B blocks a row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lockstep.core.errors import ConfigError
from lockstep.core.quantization import WeightScheme
from lockstep.kernels.linear.formats import QuantizedWeight

BLOCK = 32
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}


def gguf_type(scheme: WeightScheme) -> str:
    """The GGUF type that holds the scheme's codes: Q8_0, Q4_0 or Q4_1."""
    if scheme.bits == 8:
        return "Q8_0"
    return "Q4_0" if scheme.offset == "symmetric" else "Q4_1"


def to_blocks(weight: QuantizedWeight) -> np.ndarray:
    """The weight's rows as bytes (N, B * bytes of a block)."""
    n, k = weight.shape
    if k % BLOCK:
        raise ConfigError(f"GGUF cuts rows into blocks of {BLOCK}, which does not divide {k}")
    scales_NB = weight.scales_NG.expand(n, k // BLOCK)
    codes_NBI = weight.values_NK.view(n, -1, BLOCK)
    parts = [_half_bytes(scales_NB)]
    if weight.scheme.bits == 8:
        parts.append(codes_NBI ^ 128)
    else:
        if weight.scheme.offset != "symmetric":
            parts.append(_half_bytes(_minimums(weight)))
        parts.append(codes_NBI[..., : BLOCK // 2] | codes_NBI[..., BLOCK // 2 :] << 4)
    return torch.cat(parts, -1).flatten(1).numpy()


def _minimums(weight: QuantizedWeight) -> Tensor:
    assert weight.minimums_NG is not None
    if weight.scheme.offset == "minimum":
        return weight.minimums_NG
    return -weight.scales_NG.float() * weight.minimums_NG.float()


def _half_bytes(x_NB: Tensor) -> Tensor:
    """fp16 as bytes, (N, B, 2)."""
    return x_NB.to(torch.float16).contiguous().view(torch.uint8).view(*x_NB.shape, 2)
