"""One layer's weights, rounded by one of the methods.

| method | before rounding | rounding |
|---|---|---|
| rtn | nothing | to the nearest level |
| gptq | nothing | column by column, errors fed forward |
| awq | scales folded that spare the weights that matter | to the nearest level |
| smoothquant | scales folded that take outliers off activations | to the nearest level |

Levels are always searched for (`grid`), weighted by what the inputs of a weight are worth where
there is calibration text. Legend: N outputs, K inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.compress.config import Method
from lockstep.compress.descent import improve
from lockstep.compress.gptq import gptq, output_error
from lockstep.compress.grid import Grid, fit_grid, groups_of
from lockstep.compress.layer_stream import PROJECTIONS, projection
from lockstep.compress.scale_search import fold_awq, fold_smoothquant
from lockstep.compress.statistics import READERS, InputStatistics
from lockstep.core.quantization import WeightScheme
from lockstep.kernels.linear.formats import FP8, QuantizedWeight
from lockstep.models.llama import Layer

STORED = torch.bfloat16
"""Dtype of what stays unquantised, and of scales in safetensors."""


@dataclass(frozen=True, kw_only=True)
class RoundedWeight:
    """One weight's result."""

    weight: QuantizedWeight
    relative_error: float
    """Of its output over the calibration tokens (of itself, without calibration), root mean square
    over root mean square."""


@torch.no_grad()
def quantize_layer(
    layer: Layer,
    stats: dict[str, InputStatistics] | None,
    *,
    scheme: WeightScheme,
    method: Method,
    damping: float,
) -> dict[str, RoundedWeight]:
    """Round all projections of the layer, by name; folds change its norms and projections."""
    if stats is None:
        assert method == "rtn", method
    elif method == "awq":
        stats = fold_awq(layer, stats, scheme, STORED)
    elif method == "smoothquant":
        stats = fold_smoothquant(layer, stats, scheme, STORED)
    readers = {name: first for first, names in READERS.items() for name in names}
    return {
        name: _round(
            projection(layer, name).weight,
            None if stats is None else stats[readers[name]],
            scheme,
            feed_forward=method == "gptq",
            damping=damping,
        )
        for name in PROJECTIONS
    }


def quantize_nearest(weight_NK: Tensor, scheme: WeightScheme) -> QuantizedWeight:
    """Round one weight to the nearest levels, all inputs alike."""
    return _round(weight_NK, None, scheme, feed_forward=False, damping=0.0).weight


def _round(
    weight_NK: Tensor,
    inputs: InputStatistics | None,
    scheme: WeightScheme,
    *,
    feed_forward: bool,
    damping: float,
) -> RoundedWeight:
    scale_dtype = torch.float16 if scheme.is_gguf else STORED
    groups_K = groups_of(scheme, weight_NK.shape[1])
    if feed_forward:
        assert inputs is not None
        grid, codes_NK = _best_by_gptq(weight_NK, inputs, scheme, scale_dtype, damping)
    else:
        importance_K = None if inputs is None else inputs.importance_K
        grid = fit_grid(weight_NK, scheme, importance_K=importance_K, scale_dtype=scale_dtype)
        codes_NK = grid.round(weight_NK, groups_K)
    delta_NK = grid.values(codes_NK, groups_K) - weight_NK
    return RoundedWeight(
        weight=_quantized(grid, codes_NK, scale_dtype),
        relative_error=_relative_error(delta_NK, weight_NK, inputs),
    )


def _best_by_gptq(
    weight_NK: Tensor,
    inputs: InputStatistics,
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    damping: float,
) -> tuple[Grid, Tensor]:
    """Levels and codes, the better of two, then improved.

    Feeding errors forward makes all inputs share them, so levels fitted to all inputs alike mostly
    win over those that favour important ones (SmolLM2's v: a seventh less error), but lose where
    few inputs dominate (its down: twice the error). Both are tried.
    """
    h_KK, groups_K = inputs.hessian_KK, groups_of(scheme, weight_NK.shape[1])
    found = []
    for importance_K in (None, inputs.importance_K):
        grid = fit_grid(weight_NK, scheme, importance_K=importance_K, scale_dtype=scale_dtype)
        codes_NK = gptq(weight_NK, grid, h_KK, damping=damping)
        error = output_error(grid.values(codes_NK, groups_K) - weight_NK, h_KK)
        found.append((error, grid, codes_NK))
    _, grid, codes_NK = min(found, key=lambda candidate: candidate[0])
    return improve(weight_NK, grid, codes_NK, h_KK, damping=damping, scale_dtype=scale_dtype)


def _quantized(grid: Grid, codes_NK: Tensor, scale_dtype: torch.dtype) -> QuantizedWeight:
    scheme, offset = grid.scheme, grid.offset_NG
    if offset is not None:
        offset = offset.to(torch.uint8 if scheme.offset == "zero_point" else scale_dtype)
    stored = codes_NK + scheme.stored_offset
    return QuantizedWeight(
        scheme=scheme,
        values_NK=stored.to(FP8 if scheme.kind == "float" else torch.uint8),
        scales_NG=grid.scale_NG.to(scale_dtype),
        minimums_NG=offset,
    )


def _relative_error(delta_NK: Tensor, weight_NK: Tensor, inputs: InputStatistics | None) -> float:
    if inputs is None:
        return float(delta_NK.norm() / weight_NK.norm().clamp_min(1e-30))
    whole = output_error(weight_NK, inputs.hessian_KK)
    return math.sqrt(max(output_error(delta_NK, inputs.hessian_KK), 0.0) / whole) if whole else 0.0
