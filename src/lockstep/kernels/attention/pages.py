"""Pages of keys and values: 16 tokens of one layer, and the formats they may be kept in.

fp32: keys (block, K, H, 16), transposed so that scores are computed 16 keys at a time; values
(block, K, 16, Hp), Hp being H rounded up to 16. All others hold neighbours in pairs, as the pair
dot product wants them: keys (block, K, H / 2, 16, 2), values (block, K, 8, Hp, 2), two tokens side
by side. int8 and fp8 (e4m3) carry one fp32 scale for each (block, K, 16) key and value: the largest
magnitude of the H numbers over the largest code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BLOCK = 16

KVFormat = Literal["fp32", "bf16", "int8", "fp8"]

_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
_NAMES: dict[torch.dtype, KVFormat] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
}
_LARGEST_CODE = {"int8": 127.0, "fp8": 448.0}


def padded_head_dim(head_dim: int) -> int:
    return -(-head_dim // 16) * 16


def native_format(dtype: torch.dtype) -> KVFormat:
    """The format that keeps keys and values of this compute dtype as they are."""
    return "bf16" if dtype == torch.bfloat16 else "fp32"


@dataclass(frozen=True, kw_only=True)
class KVPages:
    """One layer's pages; scales where the format has them."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None

    @property
    def format(self) -> KVFormat:
        return format_of(self.k)


def format_of(k_pages: Tensor) -> KVFormat:
    return _NAMES[k_pages.dtype]


def empty_pages(
    num_blocks: int,
    num_kv_heads: int,
    head_dim: int,
    kv_format: KVFormat,
    empty: Callable[[Sequence[int], torch.dtype], Tensor],
) -> KVPages:
    """Uninitialised pages in memory that `empty(shape, dtype)` gives."""
    dtype, padded = _DTYPES[kv_format], padded_head_dim(head_dim)
    heads = (num_blocks, num_kv_heads)
    scales = (*heads, BLOCK) if kv_format in _LARGEST_CODE else None
    pairs = kv_format != "fp32"
    return KVPages(
        k=empty((*heads, head_dim // 2, BLOCK, 2) if pairs else (*heads, head_dim, BLOCK), dtype),
        v=empty((*heads, BLOCK // 2, padded, 2) if pairs else (*heads, BLOCK, padded), dtype),
        k_scales=None if scales is None else empty(scales, torch.float32),
        v_scales=None if scales is None else empty(scales, torch.float32),
    )


def bytes_per_block(num_kv_heads: int, head_dim: int, kv_format: KVFormat) -> int:
    """Memory of one layer's block."""
    numbers = (head_dim + padded_head_dim(head_dim)) * _DTYPES[kv_format].itemsize
    scales = 2 * torch.float32.itemsize if kv_format in _LARGEST_CODE else 0
    return num_kv_heads * BLOCK * (numbers + scales)


def quantise(x: Tensor, kv_format: KVFormat) -> tuple[Tensor, Tensor]:
    """Codes of x (..., H) and the fp32 scale of each last dim, for int8 and fp8.

    Where anything is not finite the codes are 0 and the scale NaN.
    """
    largest_code, x = _LARGEST_CODE[kv_format], x.float()
    largest = x.abs().amax(-1)
    inverse = torch.tensor(largest_code) / largest  # a Python number would divide in two roundings
    plain = (largest > 0) & largest.isfinite() & inverse.isfinite()
    values = torch.where(plain[..., None], x * inverse[..., None], 0.0)
    values = values.clamp(-largest_code, largest_code)
    codes = values.round() if kv_format == "int8" else values
    scale = torch.where(plain, largest / largest_code, 0.0)
    return codes.to(_DTYPES[kv_format]), torch.where(largest.isfinite(), scale, math.nan)


def rounded_to(x: Tensor, kv_format: KVFormat) -> Tensor:
    """x as a cache of this format gives it back, in fp32."""
    if kv_format not in _LARGEST_CODE:
        return x.to(_DTYPES[kv_format]).float()
    codes, scales = quantise(x, kv_format)
    return codes.float() * scales[..., None]
