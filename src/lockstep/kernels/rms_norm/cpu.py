"""Native rms_norm: one pass to sum 16 lanes in a fixed tree, one to scale. Moves x twice (once from
cache), y once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.native_library import DTYPE_CODE, address, native


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    x_TD, weight_D = x_TD.contiguous(), weight_D.to(x_TD.dtype)
    y_TD = torch.empty_like(x_TD) if out is None else out
    native().ls_rms_norm(
        y_TD.data_ptr(),
        x_TD.data_ptr(),
        weight_D.data_ptr(),
        DTYPE_CODE[x_TD.dtype],
        DTYPE_CODE[weight_D.dtype],
        x_TD.shape[0],
        x_TD.shape[1],
        eps,
    )
    return y_TD


def rms_norm_backward(
    dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    dw_D = torch.empty(x_TD.shape[1], dtype=torch.float32)
    return grad_input(dy_TD, x_TD, weight_D, eps, dw_D=dw_D), dw_D


def grad_input(
    dy_TD: Tensor,
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    *,
    added_TD: Tensor | None = None,
    dw_D: Tensor | None = None,
) -> Tensor:
    """dx, plus what came to x past the norm, rounded once; the weight's gradient (fp32) goes to
    `dw_D`.
    """
    x_TD, dy_TD, weight_D = x_TD.contiguous(), dy_TD.contiguous(), weight_D.to(x_TD.dtype)
    added_TD = None if added_TD is None else added_TD.contiguous()
    dx_TD = torch.empty_like(x_TD)
    native().ls_rms_norm_backward(
        dx_TD.data_ptr(),
        address(dw_D),
        dy_TD.data_ptr(),
        x_TD.data_ptr(),
        weight_D.data_ptr(),
        address(added_TD),
        DTYPE_CODE[x_TD.dtype],
        DTYPE_CODE[weight_D.dtype],
        x_TD.shape[0],
        x_TD.shape[1],
        eps,
    )
    return dx_TD
