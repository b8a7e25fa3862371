"""Weights in panels of 64 columns, as the native product reads them (docs/decisions/011).

`PackedFormat` is how a packed weight is held; one packed weight may be several weights side by side
(q, k and v), or gate and up in every other 16 columns, so that one product computes both. Packing
copies and rearranges; it never rounds what is quantised. Legend: N outputs, K inputs, G groups,
S super groups.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lockstep.core.quantization import ACTIVATION_BLOCK, WeightScheme
from lockstep.kernels import huge_pages
from lockstep.kernels.native_library import DTYPE_CODE, address, native

PANEL = 64
_LANES = 16

_VALUES = ("fp32", "bf16", "u8", "u4", "fp8")
_SCALES = ("none", "channel", "fp32", "fp16", "bf16", "super_unsigned", "super_signed")
_SHIFTS = ("offset", "zero_point", "minimum")
_SCALE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, kw_only=True)
class PackedFormat:
    """How a packed weight is held; `code` is the word that kernels take (native/simd/gemm.h)."""

    values: Literal["fp32", "bf16", "u8", "u4", "fp8"]
    scales: str = "none"
    """One of _SCALES: one fp32 a channel, floats by group, or fp16 super scales times integers."""
    shift: Literal["offset", "zero_point", "minimum"] = "offset"
    offset: int = 0
    """Taken off every stored value, where shift is "offset"."""
    group: int = 0
    """Inputs that share a scale: 16, 32, or a multiple of 64."""
    int_activations: bool = False
    """Rows are quantised to 8 bits by token and block of 64 inputs."""

    @functools.cached_property
    def code(self) -> int:
        return (
            _VALUES.index(self.values)
            | _SCALES.index(self.scales) << 8
            | _SHIFTS.index(self.shift) << 16
            | self.offset << 24
            | self.group << 32
            | int(self.int_activations) << 48
        )

    @property
    def is_float(self) -> bool:
        return self.values in ("fp32", "bf16")

    def num_bytes(self, columns: int, k: int) -> int:
        """Bytes of a packed weight of that many columns."""
        panels = -(-columns // PANEL)
        if self.is_float:
            return panels * PANEL * (4 * k if self.values == "fp32" else 2 * (k + k % 2))
        pieces = max(1, ACTIVATION_BLOCK // self.group) if self.group else 1
        scale = {"fp32": 4, "fp16": 2, "bf16": 2}.get(self.scales, 1) if self.group else 0
        shift = {"offset": 0, "zero_point": 1, "minimum": scale}[self.shift]
        supers = 0 if not self.scales.startswith("super") else 4 if self.shift == "minimum" else 2
        values = ACTIVATION_BLOCK // 2 if self.values == "u4" else ACTIVATION_BLOCK
        record = supers + pieces * (scale + shift) + values
        channel = 4 if self.scales == "channel" else 0
        return panels * PANEL * (-(-k // ACTIVATION_BLOCK) * record + channel)


FLOAT_FORMATS = {
    torch.float32: PackedFormat(values="fp32"),
    torch.bfloat16: PackedFormat(values="bf16"),
}


@functools.cache
def format_of(scheme: WeightScheme, scale_dtype: torch.dtype) -> PackedFormat:
    """The packed form of a scheme whose scales (super scales, for k-quants) have that dtype."""
    if scheme.super_group_size is not None:
        assert scale_dtype == torch.float16, f"super scales are fp16, not {scale_dtype}"
        scales = "super_unsigned" if scheme.offset == "minimum" else "super_signed"
    else:
        scales = "channel" if scheme.group_size is None else _SCALE_NAMES[scale_dtype]
    return PackedFormat(
        values="fp8" if scheme.kind == "float" else "u4" if scheme.bits == 4 else "u8",
        scales=scales,
        shift="offset" if scheme.offset == "symmetric" else scheme.offset,
        offset=scheme.stored_offset,
        group=scheme.group_size or 0,
        int_activations=scheme.activation_bits == 8,
    )


def columns_of(sizes: Sequence[int], interleaved: bool = False) -> int:
    """Columns of a packed weight of pieces with that many outputs each."""
    if not interleaved:
        return sum(sizes)
    assert len(sizes) == 2, f"gate and up interleave, not {len(sizes)} pieces"
    assert sizes[0] == sizes[1], f"gate has {sizes[0]} outputs, up {sizes[1]}"
    return 2 * _LANES * -(-sizes[0] // _LANES)


def first_columns(sizes: Sequence[int], interleaved: bool = False) -> list[int]:
    """Where each piece begins."""
    if interleaved:
        return [0, _LANES]
    return [sum(sizes[:i]) for i in range(len(sizes))]


def pack(pieces: Sequence[Tensor], dtype: torch.dtype, *, interleaved: bool = False) -> Tensor:
    """Float weights (N, K) side by side, rounded to `dtype`; on huge pages, for weights stay."""
    sizes, k = [piece.shape[0] for piece in pieces], pieces[0].shape[1]
    columns = columns_of(sizes, interleaved)
    num_elements = FLOAT_FORMATS[dtype].num_bytes(columns, k) // dtype.itemsize
    packed = huge_pages.empty((num_elements,), dtype)
    if len(pieces) > 1:
        packed.zero_()
    for piece, first in zip(pieces, first_columns(sizes, interleaved), strict=True):
        pack_into(packed, piece, first_column=first, interleaved=interleaved)
    return packed


def pack_into(
    packed: Tensor,
    matrix_NK: Tensor,
    *,
    first_column: int = 0,
    interleaved: bool = False,
    first_input: int = 0,
    num_inputs: int | None = None,
) -> Tensor:
    """Pack a matrix of any strides; from column 0 on the rest of its last panel is cleared. It may
    be the inputs from `first_input` (even) on of a weight with `num_inputs`.
    """
    num_inputs = matrix_NK.shape[1] if num_inputs is None else num_inputs
    assert first_input % 2 == 0, "pairs of inputs are never split"
    native().ls_pack(
        packed.data_ptr(),
        DTYPE_CODE[packed.dtype],
        matrix_NK.data_ptr(),
        DTYPE_CODE[matrix_NK.dtype],
        *matrix_NK.shape,
        *matrix_NK.stride(),
        first_column,
        int(interleaved),
        first_input,
        num_inputs,
    )
    return packed


def pack_quantised_into(
    packed: Tensor,
    fmt: PackedFormat,
    values_NK: Tensor,
    scales_NG: Tensor,
    shifts_NG: Tensor | None = None,
    super_scales_NS: Tensor | None = None,
    super_minimums_NS: Tensor | None = None,
    *,
    first_column: int = 0,
    interleaved: bool = False,
) -> Tensor:
    """Pack a quantised weight in its row-major form (`QuantizedWeight`): bytes, scales in the
    format's dtype, zero points or minimums, both levels of k-quants.
    """
    if fmt.scales == "channel":
        scales_NG = scales_NG.float()
    given = (values_NK, scales_NG, shifts_NG, super_scales_NS, super_minimums_NS)
    contiguous = [None if tensor is None else tensor.contiguous() for tensor in given]
    native().ls_pack_quantised(
        packed.data_ptr(),
        fmt.code,
        *map(address, contiguous),
        *values_NK.shape,
        first_column,
        int(interleaved),
    )
    return packed


def pack_bias(pieces: Sequence[Tensor], dtype: torch.dtype, *, interleaved: bool = False) -> Tensor:
    """fp32 bias of each column of a packed weight, rounded to the compute dtype first."""
    bias = [piece.to(dtype).float() for piece in pieces]
    if not interleaved:
        return torch.cat(bias)
    padded = [torch.nn.functional.pad(b, (0, -len(b) % _LANES)).view(-1, _LANES) for b in bias]
    return torch.stack(padded, 1).flatten()
