"""Packed weights, kept beside the modules that own the weights, made anew when those change.

A product may take several weights at once (q, k and v): they are packed side by side, with their
biases and the weight of the norm before them, rounded as the kernel takes them. So a step without
gradients calls nothing but kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError
from lockstep.core.quantization import WeightScheme
from lockstep.kernels import dispatch, huge_pages, native_library
from lockstep.kernels.linear import packing
from lockstep.kernels.linear.formats import (
    QuantizedWeight,
    can_concatenate,
    concatenate,
    quantize_rtn,
)
from lockstep.kernels.linear.packing import PackedFormat

Weight = Tensor | QuantizedWeight

PACKED_FIELDS = ("data", "bias", "norm_weight", "num_outputs")

RELEASED = (
    "the model's weights were released to serve in one precision; load it again to train it, to "
    "compute in another or with reference kernels"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Packed:
    """Weights side by side, ready for a product in one compute dtype."""

    data: Tensor
    """What the native kernel reads; empty where the reference runs."""
    format: PackedFormat
    num_outputs: int
    """Columns of the product: of all weights, or of the gated pair."""
    bias: Tensor | None
    """fp32 by packed column."""
    norm_weight: Tensor | None
    """Of the norm before the product, in the compute dtype."""
    quantized: QuantizedWeight | None
    """All weights as one, where they are quantised."""


class PackCache:
    """The packed form of some weights. `get` packs when one was written to (its version counter
    moved), into the same memory where the format allows, so that recorded addresses stay good.

    A weight in training is written to after each use, so its copy is not kept: packing is 0.4% of
    a step, and the copies of all weights half the memory of the weights.
    """

    def __init__(self, *, interleaved: bool = False) -> None:
        self._interleaved = interleaved
        self._packed: Packed | None = None
        self._versions: list[tuple[object, ...]] = []
        self._settings: tuple[object, ...] = ()
        self._members: tuple[object, ...] = ()
        self._is_pinned = False

    def get(
        self,
        weights: Sequence[Weight],
        dtype: torch.dtype,
        *,
        biases: Sequence[Tensor] = (),
        norm_weight: Tensor | None = None,
        scheme: WeightScheme | None = None,
    ) -> Packed:
        """All weights as one. Float weights are rounded to `scheme` first, if one is given."""
        settings = (
            *(_version(bias) for bias in biases),
            None if norm_weight is None else _version(norm_weight),
            dtype,
            scheme,
            _runs_reference(),
        )
        if self._is_pinned:
            assert self._packed is not None
            self._settings = self._settings or settings  # what was adopted has the model's
            is_native = self._packed.data.numel() > 0
            if settings != self._settings or is_native == _runs_reference():
                raise ConfigError(RELEASED)
            return self._packed
        versions = [_version(weight) for weight in weights]
        if self._packed is not None and (versions, settings) == (self._versions, self._settings):
            return self._packed
        is_kept = not torch.is_grad_enabled() or not any(_is_trained(w) for w in weights)
        packed = self._pack(weights, dtype, biases, norm_weight, scheme, is_kept=is_kept)
        if is_kept:
            self._packed, self._versions, self._settings = packed, versions, settings
            self._members = (*weights, *biases)  # an address must not be given to another tensor
        return packed

    def pin(self) -> None:
        """Keep what is packed although the weights are about to be released."""
        if self._packed is None:
            return
        self._is_pinned = True
        self._members = ()
        whole = self._packed.quantized
        self._packed = replace(self._packed, quantized=None if whole is None else release(whole))

    def parts(self) -> dict[str, Tensor]:
        """What is packed, for `adopt` elsewhere; empty where nothing is."""
        if self._packed is None:
            return {}
        count = torch.tensor([self._packed.num_outputs])
        values = (self._packed.data, self._packed.bias, self._packed.norm_weight, count)
        return {f: t for f, t in zip(PACKED_FIELDS, values, strict=True) if t is not None}

    @property
    def quantized(self) -> QuantizedWeight | None:
        """What is packed, if quantised, as one weight."""
        return None if self._packed is None else self._packed.quantized

    def adopt(
        self,
        parts: Mapping[str, Tensor | None],
        dtype: torch.dtype,
        quantized: QuantizedWeight | None = None,
    ) -> None:
        """Take what `parts` and `quantized` gave elsewhere, whatever becomes of the weights
        themselves; `quantized` may be without memory.
        """
        data, count = parts["data"], parts["num_outputs"]
        assert data is not None
        assert count is not None
        self._packed = Packed(
            data=data,
            format=packing.FLOAT_FORMATS[dtype]
            if quantized is None
            else format_of_weight(quantized),
            num_outputs=int(count),
            bias=parts["bias"],
            norm_weight=parts["norm_weight"],
            quantized=quantized,
        )
        self._settings = ()
        self._is_pinned = True

    @torch.no_grad()
    def _pack(
        self,
        weights: Sequence[Weight],
        dtype: torch.dtype,
        biases: Sequence[Tensor],
        norm_weight: Tensor | None,
        scheme: WeightScheme | None,
        *,
        is_kept: bool,
    ) -> Packed:
        if any(is_released(weight) for weight in weights):
            raise ConfigError(RELEASED)
        if scheme is not None:
            weights = [quantize_rtn(w, scheme) if isinstance(w, Tensor) else w for w in weights]
        quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        assert len(quantized) in (0, len(weights)), "quantised and float weights in one product"
        sizes = [weight.shape[0] for weight in weights]
        fmt = format_of_weight(quantized[0]) if quantized else packing.FLOAT_FORMATS[dtype]
        columns = packing.columns_of(sizes, self._interleaved)
        if _runs_reference():
            data = torch.empty(0, dtype=torch.uint8 if quantized else dtype)
        else:
            data = self._memory(fmt, fmt.num_bytes(columns, weights[0].shape[1]), is_kept=is_kept)
            self._fill(data, fmt, weights, sizes)
        return Packed(
            data=data,
            format=fmt,
            num_outputs=sizes[0] if self._interleaved else sum(sizes),
            bias=packing.pack_bias(biases, dtype, interleaved=self._interleaved)
            if biases
            else None,
            norm_weight=None if norm_weight is None else norm_weight.detach().to(dtype),
            quantized=concatenate(quantized) if quantized else None,
        )

    def _memory(self, fmt: PackedFormat, num_bytes: int, *, is_kept: bool) -> Tensor:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(fmt.values, torch.uint8)
        if not is_kept:
            return torch.empty(num_bytes // dtype.itemsize, dtype=dtype)
        before = self._packed
        if before is not None and before.format == fmt and before.data.nbytes == num_bytes:
            return before.data
        return huge_pages.empty((num_bytes // dtype.itemsize,), dtype)

    def _fill(
        self, data: Tensor, fmt: PackedFormat, weights: Sequence[Weight], sizes: Sequence[int]
    ) -> None:
        if len(weights) > 1:
            # Columns between pieces that no piece fills. Not `zero_`: it would count as a change of
            # every tensor on the same chunk of memory, some of which autograd has saved.
            ctypes.memset(data.data_ptr(), 0, data.nbytes)
        firsts = packing.first_columns(sizes, self._interleaved)
        for weight, first in zip(weights, firsts, strict=True):
            if isinstance(weight, Tensor):
                packing.pack_into(
                    data, weight.detach(), first_column=first, interleaved=self._interleaved
                )
            else:
                packing.pack_quantised_into(
                    data,
                    fmt,
                    weight.values_NK,
                    weight.scales_NG,
                    weight.minimums_NG,
                    weight.super_scales_NS,
                    weight.super_minimums_NS,
                    first_column=first,
                    interleaved=self._interleaved,
                )


def release(weight: Weight) -> Weight:
    """The same weight without its memory, to stand for one that is only needed packed."""
    if isinstance(weight, QuantizedWeight):
        return weight.to("meta")
    return torch.nn.Parameter(weight.detach().to("meta"), requires_grad=False)


def is_released(weight: Weight) -> bool:
    tensor = weight.values_NK if isinstance(weight, QuantizedWeight) else weight
    return tensor.is_meta


def format_of_weight(weight: QuantizedWeight) -> PackedFormat:
    """How the native kernel holds it."""
    scales = weight.scales_NG if weight.super_scales_NS is None else weight.super_scales_NS
    return packing.format_of(weight.scheme, scales.dtype)


def can_pack_together(weights: Sequence[Weight]) -> bool:
    """Whether one product can compute them: all float, or all in one quantised format."""
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(quantized) < len(weights):
        return not quantized
    return can_concatenate(quantized)


def _is_trained(weight: Weight) -> bool:
    return isinstance(weight, Tensor) and weight.requires_grad


def _version(member: Weight) -> tuple[object, ...]:
    if isinstance(member, Tensor):
        return member._version, member.data_ptr()
    return (id(member),)


def _runs_reference() -> bool:
    return dispatch.is_reference_forced() or native_library.missing_reason() is not None
