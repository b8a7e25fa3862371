"""GPTQ: rounding a weight column by column, each column's error made good by those to come.

Minimises tr((W - Q) H (W - Q)^T), H = sum over the calibration tokens of x x^T: the squared error
of the layer's output. Column k is rounded; its error, divided by the Cholesky factor's diagonal, is
spread over the columns not yet rounded (Frantar et al. 2022, algorithm 1). Columns are taken in
descending order of H's diagonal ("act-order"): what matters most is rounded first, while all others
can still make it good. Levels are fitted before (`grid`), so the order leaves no trace in the
format.

Legend: N outputs, K inputs, B columns of a block.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.compress.grid import Grid, groups_of

DAMPING = 0.01
"""Of H's mean diagonal, added to its diagonal."""
_BLOCK = 128
_RIDGE = 1e-5


def gptq(weight_NK: Tensor, grid: Grid, hessian_KK: Tensor, *, damping: float = DAMPING) -> Tensor:
    """Codes (N, K) of the weight on the grid, in fp32."""
    order_K = hessian_KK.diagonal().argsort(descending=True, stable=True)
    groups_K = groups_of(grid.scheme, weight_NK.shape[1])[order_K]
    w_NK = weight_NK.float()[:, order_K].clone()
    upper_KK = _error_spread(hessian_KK[order_K][:, order_K], damping)
    codes_NK = torch.empty_like(w_NK)
    for start in range(0, w_NK.shape[1], _BLOCK):
        block = slice(start, min(start + _BLOCK, w_NK.shape[1]))
        w_NB, u_BB = w_NK[:, block].t().contiguous(), upper_KK[block, block]
        errors, codes = torch.empty_like(w_NB), torch.empty_like(w_NB)
        for j in range(len(w_NB)):
            group = groups_K[start + j : start + j + 1]
            column = w_NB[j]
            codes[j] = grid.round(column[:, None], group)[:, 0]
            error = (column - grid.values(codes[j][:, None], group)[:, 0]) / u_BB[j, j]
            w_NB[j + 1 :].addcmul_(u_BB[j, j + 1 :, None], error[None], value=-1)
            errors[j] = error
        codes_NK[:, block] = codes.t()
        w_NK[:, block.stop :] -= errors.t() @ upper_KK[block, block.stop :]
    restored = torch.empty_like(codes_NK)
    restored[:, order_K] = codes_NK
    return restored


def _error_spread(hessian_KK: Tensor, damping: float) -> Tensor:
    """Upper Cholesky factor of the inverse of the damped H, fp32; computed in fp64."""
    h = hessian_KK.double()
    mean = h.diagonal().mean()
    if not torch.isfinite(mean) or mean <= 0:
        return torch.eye(len(h))
    h.diagonal().add_(damping * mean)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    return torch.linalg.cholesky(inverse, upper=True).float()


def refit_scales(
    weight_NK: Tensor, grid: Grid, codes_NK: Tensor, hessian_KK: Tensor, dtype: torch.dtype
) -> Grid:
    """The grid with the scales that make the output's error least, the codes held still.

    For each output n, with q the codes less their zero points: A s = b over its groups, A[g, h] =
    q_g H_gh q_h, b[g] = q_g H_g w. A scale that would move by more than a quarter stays.
    """
    assert grid.scheme.offset != "minimum", grid.scheme
    num_inputs = weight_NK.shape[1]
    groups_K = groups_of(grid.scheme, num_inputs)
    num_groups = grid.scale_NG.shape[1]
    member_KG = F.one_hot(groups_K, num_groups).float()
    q_NK = codes_NK if grid.offset_NG is None else codes_NK - grid.offset_NG[:, groups_K]
    h_KK = hessian_KK + torch.eye(num_inputs) * hessian_KK.diagonal().mean() * DAMPING
    a_NGG = torch.empty(len(q_NK), num_groups, num_groups)
    for group in range(num_groups):
        inputs = groups_K == group
        a_NGG[:, :, group] = ((q_NK[:, inputs] @ h_KK[inputs]) * q_NK) @ member_KG
    b_NG = ((weight_NK.float() @ h_KK) * q_NK) @ member_KG
    diagonal_NG = a_NGG.diagonal(dim1=1, dim2=2)
    diagonal_NG += diagonal_NG.mean(1, keepdim=True) * _RIDGE + torch.finfo(torch.float32).tiny
    solved_NG = torch.linalg.solve(a_NGG, b_NG)
    ratio_NG = solved_NG / grid.scale_NG
    is_near_NG = (ratio_NG > 0.75) & (ratio_NG < 1.25)
    scale_NG = torch.where(is_near_NG, solved_NG, grid.scale_NG).to(dtype).float()
    return dataclasses.replace(grid, scale_NG=scale_NG)


def output_error(delta_NK: Tensor, hessian_KK: Tensor) -> float:
    """Squared error of the layer's output over the calibration tokens: tr(D H D^T)."""
    return float(((delta_NK @ hessian_KK.float()) * delta_NK).sum())
