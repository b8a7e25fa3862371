"""Blocks of GGUF's quantised types, taken apart without rounding anything.

Layouts: ggml-common.h of https://github.com/ggml-org/ggml (block_q8_0, block_q5_0, block_q4_K
and so on). Legend: N rows, B blocks a row; a block is a run of bytes along K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lockstep.core.quantization import SCHEMES
from lockstep.kernels.linear.formats import QuantizedWeight

BLOCK_BYTES: Mapping[str, int] = {
    "q8_0": 34,
    "q5_0": 22,
    "q5_1": 24,
    "q4_0": 18,
    "q4_1": 20,
    "q4_k": 144,
    "q6_k": 210,
}


def from_blocks(raw: Tensor, name: str) -> QuantizedWeight:
    """A weight from the bytes of its rows, (N, B * bytes of a block) uint8, of a GGUF type."""
    n, num_bytes = raw.shape
    size = BLOCK_BYTES[name]
    assert num_bytes % size == 0, f"rows of {num_bytes} bytes are not {name} blocks of {size}"
    return _READERS[name](raw.view(n, -1, size))


def _half(blocks: Tensor, start: int) -> Tensor:
    """The fp16 at a byte of each block, (N, B)."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(data: Tensor) -> Tensor:
    """Low nibbles of a run of bytes, then its high ones."""
    return torch.cat([data & 15, data >> 4], -1)


def _q8_0(blocks: Tensor) -> QuantizedWeight:
    return QuantizedWeight(
        scheme=SCHEMES["q8_0"],
        values_NK=(blocks[..., 2:] ^ 128).flatten(1),
        scales_NG=_half(blocks, 0),
    )


def _fifth_bits(data: Tensor) -> Tensor:
    """32 bits in 4 bytes, least significant first, each as 16 or 0."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((data[..., None] >> shifts & 1) << 4).flatten(-2)


def _q5_0(blocks: Tensor) -> QuantizedWeight:
    return QuantizedWeight(
        scheme=SCHEMES["q5_0"],
        values_NK=(_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])).flatten(1),
        scales_NG=_half(blocks, 0),
    )


def _q5_1(blocks: Tensor) -> QuantizedWeight:
    return QuantizedWeight(
        scheme=SCHEMES["q5_1"],
        values_NK=(_nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])).flatten(1),
        scales_NG=_half(blocks, 0),
        minimums_NG=_half(blocks, 2),
    )


def _q4_0(blocks: Tensor) -> QuantizedWeight:
    return QuantizedWeight(
        scheme=SCHEMES["q4_0"],
        values_NK=_nibbles(blocks[..., 2:]).flatten(1),
        scales_NG=_half(blocks, 0),
    )


def _q4_1(blocks: Tensor) -> QuantizedWeight:
    return QuantizedWeight(
        scheme=SCHEMES["q4_1"],
        values_NK=_nibbles(blocks[..., 4:]).flatten(1),
        scales_NG=_half(blocks, 0),
        minimums_NG=_half(blocks, 2),
    )


def _q4_k(blocks: Tensor) -> QuantizedWeight:
    """d, dmin, then 8 scales and 8 minimums of 6 bits in 12 bytes, then 4 runs of 64 nibbles."""
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], -1)
    minimums = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], -1)
    return QuantizedWeight(
        scheme=SCHEMES["q4_k"],
        values_NK=_nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(1),
        scales_NG=scales.flatten(1),
        minimums_NG=minimums.flatten(1),
        super_scales_NS=_half(blocks, 0),
        super_minimums_NS=_half(blocks, 2),
    )


def _q6_k(blocks: Tensor) -> QuantizedWeight:
    """Two halves of 128 values: 64 bytes of low nibbles, 32 of high bit pairs; then 16 int8 scales
    and d. A byte of pairs serves the values 32 apart.
    """
    low = blocks[..., :128].unflatten(-1, (2, 64))
    low = torch.cat([low & 15, low >> 4], -1).unflatten(-1, (4, 32))
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    return QuantizedWeight(
        scheme=SCHEMES["q6_k"],
        values_NK=(low | (high >> shifts & 3) << 4).flatten(1),
        scales_NG=blocks[..., 192:208].contiguous().view(torch.int8).flatten(1),
        super_scales_NS=_half(blocks, 208),
    )


_READERS: Mapping[str, Callable[[Tensor], QuantizedWeight]] = {
    "q8_0": _q8_0,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q4_k": _q4_k,
    "q6_k": _q6_k,
}
