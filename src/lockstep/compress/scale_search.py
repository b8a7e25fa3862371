"""Which scale per channel to fold: the searches of AWQ and SmoothQuant.

AWQ (Lin et al. 2023, section 3.2): s = (mean |x|)^a; of all a in [0, 1] the one with the least
error of the rounded weights. The error of the output over all calibration tokens follows from
their Hessian, tr(D H D^T), so no token is kept for it.

SmoothQuant (Xiao et al. 2022, eq. 4): s = max |x|^a / max |w|^(1 - a), with rounded activations as
well; its error is measured on a sample of tokens. Both leave the layer alone where nothing helps.

Legend: K inputs of a projection, N outputs, T sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lockstep.compress.folds import fold, foldable_scale
from lockstep.compress.gptq import output_error
from lockstep.compress.grid import fit_grid, groups_of
from lockstep.compress.layer_stream import projection
from lockstep.compress.rounded import round_activations
from lockstep.compress.statistics import READERS, InputStatistics
from lockstep.core.quantization import WeightScheme
from lockstep.models.llama import Layer

_STEPS = 10
_SMALLEST = 1e-4

Candidates = Callable[[InputStatistics, Sequence[Tensor]], Iterator[Tensor]]
Score = Callable[[InputStatistics, Tensor, WeightScheme], float]
"""Error of one weight (N, K) under the statistics of its input, both scaled already."""


def fold_awq(
    layer: Layer, stats: dict[str, InputStatistics], scheme: WeightScheme, stored: torch.dtype
) -> dict[str, InputStatistics]:
    """Fold AWQ's scales into the layer; the statistics of its new inputs."""
    return _fold_best(layer, stats, scheme, stored, _awq_scales, _weight_error)


def fold_smoothquant(
    layer: Layer, stats: dict[str, InputStatistics], scheme: WeightScheme, stored: torch.dtype
) -> dict[str, InputStatistics]:
    """Fold SmoothQuant's scales into the layer; the statistics of its new inputs."""
    return _fold_best(layer, stats, scheme, stored, _smooth_scales, _product_error)


def _fold_best(
    layer: Layer,
    stats: dict[str, InputStatistics],
    scheme: WeightScheme,
    stored: torch.dtype,
    candidates: Candidates,
    score: Score,
) -> dict[str, InputStatistics]:
    folded = {}
    for reader, inputs in stats.items():
        weights = [projection(layer, name).weight for name in READERS[reader]]
        best_scale: Tensor | None = None
        best_stats = inputs
        least = sum(score(inputs, weight, scheme) for weight in weights)
        for wanted_K in candidates(inputs, weights):
            scale_K = foldable_scale(layer, reader, wanted_K, stored=stored)
            scaled = inputs.scaled(scale_K)
            error = sum(score(scaled, weight * scale_K, scheme) for weight in weights)
            if error < least:
                least, best_scale, best_stats = error, scale_K, scaled
        if best_scale is not None:
            fold(layer, reader, best_scale)
        folded[reader] = best_stats
    return folded


def _awq_scales(inputs: InputStatistics, weights: Sequence[Tensor]) -> Iterator[Tensor]:
    mean_K = inputs.mean_K.clamp_min(_SMALLEST * float(inputs.mean_K.max()))
    for step in range(1, _STEPS + 1):
        yield _centred(mean_K ** (step / _STEPS))


def _smooth_scales(inputs: InputStatistics, weights: Sequence[Tensor]) -> Iterator[Tensor]:
    x_K = inputs.largest_K.clamp_min(_SMALLEST * float(inputs.largest_K.max()))
    w_K = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    w_K = w_K.clamp_min(_SMALLEST * float(w_K.max()))
    for step in range(1, _STEPS):
        strength = step / _STEPS
        yield _centred(x_K**strength / w_K ** (1 - strength))


def _centred(scale_K: Tensor) -> Tensor:
    return scale_K / (scale_K.max() * scale_K.min()).sqrt()


def _rounded_weight(inputs: InputStatistics, weight_NK: Tensor, scheme: WeightScheme) -> Tensor:
    grid = fit_grid(weight_NK, scheme, importance_K=inputs.importance_K, search=False)
    groups_K = groups_of(scheme, weight_NK.shape[1])
    return grid.values(grid.round(weight_NK, groups_K), groups_K)


def _weight_error(inputs: InputStatistics, weight_NK: Tensor, scheme: WeightScheme) -> float:
    rounded_NK = _rounded_weight(inputs, weight_NK, scheme)
    return output_error(rounded_NK - weight_NK, inputs.hessian_KK)


def _product_error(inputs: InputStatistics, weight_NK: Tensor, scheme: WeightScheme) -> float:
    x_TK = inputs.rows_TK
    rounded_NK = _rounded_weight(inputs, weight_NK, scheme)
    delta_TN = round_activations(x_TK) @ rounded_NK.t() - x_TK @ weight_NK.t()
    return float(delta_TN.square().sum())
