"""The levels a weight is rounded to, and the search for the best ones.

A weight (N outputs, K inputs) is cut along K into G groups; a group's levels are scale * (q - zero
point), scale * q + minimum, or scale times the e4m3 numbers. Minimum and maximum of a group are a
poor guide to its best scale, so `fit_grid` tries ranges around them and keeps what errs least,
each input weighted by its importance (its mean square over the calibration text, the Hessian's
diagonal). Rounding to given levels with errors fed forward is `gptq`'s affair.

Legend: N outputs, K inputs, G groups, g inputs a group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.core.quantization import WeightScheme

_SHRINKS = tuple(1.0 - 0.04 * i for i in range(12))
"""Ranges tried, as fractions of a group's own: 1 down to 0.56."""
_TINY = torch.finfo(torch.float32).tiny
_ROWS_AT_ONCE = 256
_SMALLEST_SCALE = 2.0**-24
"""fp16's smallest number; a group of zeros must not get a scale of zero."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Levels of every group of one weight, as fp32 tensors that hold numbers of `scale_dtype`."""

    scheme: WeightScheme
    scale_NG: Tensor
    offset_NG: Tensor | None
    """Zero points (integers) or minima, as the scheme says; None where it is symmetric."""

    def round(self, weight_NK: Tensor, groups_K: Tensor) -> Tensor:
        """Codes of weights whose columns belong to `groups_K`: integers, or e4m3 numbers, in
        fp32.
        """
        scale = self.scale_NG[:, groups_K]
        offset = None if self.offset_NG is None else self.offset_NG[:, groups_K]
        return _codes(weight_NK, scale, offset, self.scheme)

    def values(self, codes_NK: Tensor, groups_K: Tensor) -> Tensor:
        """What the codes stand for, fp32."""
        scale = self.scale_NG[:, groups_K]
        offset = None if self.offset_NG is None else self.offset_NG[:, groups_K]
        return _values(codes_NK, scale, offset, self.scheme)


def groups_of(scheme: WeightScheme, num_inputs: int) -> Tensor:
    """The group each input belongs to, (K,) int64."""
    size = scheme.group_size or num_inputs
    return torch.arange(num_inputs) // size


def fit_grid(
    weight_NK: Tensor,
    scheme: WeightScheme,
    *,
    importance_K: Tensor | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
    search: bool = True,
) -> Grid:
    """Levels with the least weighted squared rounding error; importance None weighs all alike.

    Without `search` they span each group's own range.
    """
    n, k = weight_NK.shape
    size = scheme.group_size or k
    padding = -k % size
    importance_K = torch.ones(k) if importance_K is None else importance_K.float()
    # A group the text never reached would otherwise have no error anywhere.
    importance_K = importance_K + importance_K.mean() * 1e-4 + _TINY
    h_Gg = F.pad(importance_K, (0, padding)).view(-1, size)
    w_NGg = F.pad(weight_NK.float(), (0, padding)).view(n, -1, size)
    scales, offsets = [], []
    for rows in w_NGg.split(_ROWS_AT_ONCE):
        fit = _fit_rows if search else _span_rows
        scale, offset = fit(rows, h_Gg, scheme, scale_dtype)
        scales.append(scale)
        offsets.append(offset)
    has_offset = scheme.offset != "symmetric"
    return Grid(
        scheme=scheme,
        scale_NG=torch.cat(scales),
        offset_NG=torch.cat(offsets) if has_offset else None,
    )


def _fit_rows(
    w_NGg: Tensor, h_Gg: Tensor, scheme: WeightScheme, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Best (scale, offset) of each group; the offset is zero where the scheme is symmetric."""
    best_scale = best_offset = best_error = torch.empty(0)
    for scale, offset in _candidates(w_NGg, scheme, dtype):
        error = _error(w_NGg, h_Gg, scale, offset, scheme)
        if best_error.numel() == 0:
            best_scale, best_offset, best_error = scale, offset, error
            continue
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_offset = torch.where(better, offset, best_offset)
    scale, offset = _least_squares(w_NGg, h_Gg, best_scale, best_offset, scheme, dtype)
    better = _error(w_NGg, h_Gg, scale, offset, scheme) < best_error
    return torch.where(better, scale, best_scale), torch.where(better, offset, best_offset)


def _span_rows(
    w_NGg: Tensor, h_Gg: Tensor, scheme: WeightScheme, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The whole range of each group, its zero point rounded to the nearest."""
    scales, offsets = zip(*itertools.islice(_candidates(w_NGg, scheme, dtype), 2), strict=True)
    at = 1 if scheme.offset == "zero_point" else 0  # of three zero points, the middle one
    return scales[at], offsets[at]


def _candidates(
    w_NGg: Tensor, scheme: WeightScheme, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """(scale, offset) of every group, both (N, G), from the whole range to narrower ones."""
    low, high = w_NGg.amin(-1), w_NGg.amax(-1)
    zeros = torch.zeros_like(low)
    if scheme.offset == "symmetric":
        largest = torch.maximum(high, -low)
        for shrink in _SHRINKS:
            yield _as(largest * shrink / _top(scheme), dtype), zeros
        return
    levels = float((1 << scheme.bits) - 1)
    if scheme.offset == "minimum":
        middle, half = (low + high) / 2, (high - low) / 2
        for shrink in _SHRINKS:
            scale = _as(half * 2 * shrink / levels, dtype)
            yield scale, (middle - half * shrink).to(dtype).float()
        return
    # The zero point is one of the codes, so the range has to hold zero.
    low, high = low.clamp(max=0), high.clamp(min=0)
    for shrink in _SHRINKS:
        scale = _as((high - low) * shrink / levels, dtype)
        centre = (-low * shrink / scale).round()
        for step in (-1.0, 0.0, 1.0):
            yield scale, (centre + step).clamp(0, levels)


def _least_squares(
    w_NGg: Tensor,
    h_Gg: Tensor,
    scale: Tensor,
    offset: Tensor,
    scheme: WeightScheme,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The scale (and minimum) that fit the codes best, the codes held still."""
    codes = _codes(w_NGg, scale[..., None], _given(offset, scheme), scheme)
    if scheme.offset == "minimum":
        total = h_Gg.sum(-1)
        mean_q, mean_w = (h_Gg * codes).sum(-1) / total, (h_Gg * w_NGg).sum(-1) / total
        q, w = codes - mean_q[..., None], w_NGg - mean_w[..., None]
        slope = (h_Gg * q * w).sum(-1) / (h_Gg * q * q).sum(-1).clamp_min(_TINY)
        fitted = _as(slope.abs(), dtype)
        return fitted, (mean_w - fitted * mean_q).to(dtype).float()
    q = codes if scheme.offset == "symmetric" else codes - offset[..., None]
    slope = (h_Gg * q * w_NGg).sum(-1) / (h_Gg * q * q).sum(-1).clamp_min(_TINY)
    return _as(slope.abs(), dtype), offset


def _error(
    w_NGg: Tensor, h_Gg: Tensor, scale: Tensor, offset: Tensor, scheme: WeightScheme
) -> Tensor:
    given = _given(offset, scheme)
    codes = _codes(w_NGg, scale[..., None], given, scheme)
    return (h_Gg * (_values(codes, scale[..., None], given, scheme) - w_NGg).square()).sum(-1)


def _codes(w: Tensor, scale: Tensor, offset: Tensor | None, scheme: WeightScheme) -> Tensor:
    if scheme.kind == "float":
        top = _top(scheme)
        return (w / scale).clamp(-top, top).to(torch.float8_e4m3fn).float()
    if offset is None:
        top = _top(scheme)
        return (w / scale).round().clamp(-top - (scheme.bits < 8), top)
    levels = (1 << scheme.bits) - 1
    if scheme.offset == "minimum":
        return ((w - offset) / scale).round().clamp(0, levels)
    return ((w / scale).round() + offset).clamp(0, levels)


def _values(codes: Tensor, scale: Tensor, offset: Tensor | None, scheme: WeightScheme) -> Tensor:
    if offset is None:
        return codes * scale
    return codes * scale + offset if scheme.offset == "minimum" else (codes - offset) * scale


def _given(offset: Tensor, scheme: WeightScheme) -> Tensor | None:
    return None if scheme.offset == "symmetric" else offset[..., None]


def _top(scheme: WeightScheme) -> float:
    if scheme.kind == "float":
        return torch.finfo(torch.float8_e4m3fn).max
    return float((1 << (scheme.bits - 1)) - 1)


def _as(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return scale.clamp_min(_SMALLEST_SCALE).to(dtype).float()
