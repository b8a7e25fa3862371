"""Native rms_norm: one pass to sum 16 lanes in a fixed tree, one to scale. Moves x twice (once from
cache), y once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.native_library import DTYPE_CODE, native


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    x_TD, weight_D = x_TD.contiguous(), weight_D.to(x_TD.dtype)
    y_TD = torch.empty_like(x_TD)
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
    x_TD, dy_TD, weight_D = x_TD.contiguous(), dy_TD.contiguous(), weight_D.to(x_TD.dtype)
    dx_TD = torch.empty_like(x_TD)
    dw_D = torch.empty(x_TD.shape[1], dtype=torch.float32)
    native().ls_rms_norm_backward(
        dx_TD.data_ptr(),
        dw_D.data_ptr(),
        dy_TD.data_ptr(),
        x_TD.data_ptr(),
        weight_D.data_ptr(),
        DTYPE_CODE[x_TD.dtype],
        DTYPE_CODE[weight_D.dtype],
        x_TD.shape[0],
        x_TD.shape[1],
        eps,
    )
    return dx_TD, dw_D
