"""Codes and levels improved after rounding: coordinate descent on the error of the output.

GPTQ decides each code once, with no way back. Here every code is looked at again: with D = Q - W
and G = D H, moving column k of Q by d changes tr(D H D^T) by 2 d G_k + d^2 H_kk for each output,
least at d = -G_k / H_kk; the level nearest to that is never worse than the one there is. Between
passes scales are fitted to the codes again, and zero points moved by one where that helps.

Legend: N outputs, K inputs, G groups, B columns of a block.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from lockstep.compress.gptq import output_error, refit_scales
from lockstep.compress.grid import Grid, groups_of

_BLOCK = 128
_ROUNDS = 3


def improve(
    weight_NK: Tensor,
    grid: Grid,
    codes_NK: Tensor,
    hessian_KK: Tensor,
    *,
    damping: float,
    scale_dtype: torch.dtype,
) -> tuple[Grid, Tensor]:
    """Levels and codes whose output errs at most as much, under the damped H."""
    h_KK = hessian_KK + torch.eye(len(hessian_KK)) * hessian_KK.diagonal().mean() * damping
    groups_K = groups_of(grid.scheme, weight_NK.shape[1])

    def error(grid: Grid, codes_NK: Tensor) -> float:
        return output_error(grid.values(codes_NK, groups_K) - weight_NK, h_KK)

    best, least = (grid, codes_NK), error(grid, codes_NK)
    for _ in range(_ROUNDS):
        if grid.scheme.offset != "minimum":
            grid = refit_scales(weight_NK, grid, codes_NK, hessian_KK, scale_dtype)
        if grid.scheme.offset == "zero_point":
            grid = _move_zero_points(weight_NK, grid, codes_NK, h_KK)
        codes_NK = descend(weight_NK, grid, codes_NK, h_KK)
        if (now := error(grid, codes_NK)) < least:
            best, least = (grid, codes_NK), now
    return best


def descend(weight_NK: Tensor, grid: Grid, codes_NK: Tensor, h_KK: Tensor) -> Tensor:
    """One pass over all codes, columns in descending order of H's diagonal."""
    order_K = h_KK.diagonal().argsort(descending=True, stable=True)
    groups_K = groups_of(grid.scheme, len(h_KK))[order_K]
    h_KK = h_KK[order_K][:, order_K]
    diagonal_K = h_KK.diagonal().clamp_min(torch.finfo(torch.float32).tiny)
    codes_KN = codes_NK[:, order_K].t().contiguous()
    values_KN = grid.values(codes_KN.t(), groups_K).t().contiguous()
    gradient_KN = h_KK @ (values_KN - weight_NK.float()[:, order_K].t())
    for start in range(0, len(h_KK), _BLOCK):
        block = slice(start, min(start + _BLOCK, len(h_KK)))
        h_BB, moved_BN = h_KK[block, block], torch.zeros_like(values_KN[block])
        gradient_BN = gradient_KN[block].clone()
        for j in range(len(h_BB)):
            k = start + j
            group = groups_K[k : k + 1]
            wanted_N = values_KN[k] - gradient_BN[j] / diagonal_K[k]
            code_N1 = grid.round(wanted_N[:, None], group)
            moved_BN[j] = grid.values(code_N1, group)[:, 0] - values_KN[k]
            codes_KN[k] = code_N1[:, 0]
            gradient_BN.addcmul_(h_BB[j][:, None], moved_BN[j][None])
        gradient_KN += h_KK[:, block] @ moved_BN
    restored_NK = torch.empty_like(codes_NK)
    restored_NK[:, order_K] = codes_KN.t()
    return restored_NK


def _move_zero_points(weight_NK: Tensor, grid: Grid, codes_NK: Tensor, h_KK: Tensor) -> Grid:
    """Zero points one up or down where that errs less, the codes held still."""
    assert grid.offset_NG is not None
    groups_K = groups_of(grid.scheme, len(h_KK))
    levels = float((1 << grid.scheme.bits) - 1)
    zero_NG = grid.offset_NG.clone()
    gradient_NK = (grid.values(codes_NK, groups_K) - weight_NK) @ h_KK
    for group in range(zero_NG.shape[1]):
        inputs = groups_K == group
        slope_N, scale_N = gradient_NK[:, inputs].sum(1), grid.scale_NG[:, group]
        curvature = h_KK[inputs][:, inputs].sum()
        best_N = torch.zeros_like(slope_N)
        least_N = torch.zeros_like(slope_N)
        for step in (-1.0, 1.0):
            shift_N = -step * scale_N
            change_N = 2 * shift_N * slope_N + shift_N.square() * curvature
            moved_N = zero_NG[:, group] + step
            is_better_N = (change_N < least_N) & (moved_N >= 0) & (moved_N <= levels)
            best_N = torch.where(is_better_N, step, best_N)
            least_N = torch.where(is_better_N, change_N, least_N)
        zero_NG[:, group] += best_N
        gradient_NK -= (best_N * scale_N)[:, None] * h_KK[inputs].sum(0)
    return dataclasses.replace(grid, offset_NG=zero_NG)
