"""Native rope: element by element, fp32 inside, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.native_library import DTYPE_CODE, native


def rope(
    x_TNH: Tensor, positions_T: Tensor, cos_PH: Tensor, sin_PH: Tensor, inverse: bool
) -> Tensor:
    t, n, h = x_TNH.shape
    if x_TNH.stride(2) != 1 or x_TNH.stride(1) != h:
        x_TNH = x_TNH.contiguous()
    y_TNH = torch.empty(t, n, h, dtype=x_TNH.dtype)
    native().ls_rope(
        y_TNH.data_ptr(),
        x_TNH.data_ptr(),
        DTYPE_CODE[x_TNH.dtype],
        positions_T.data_ptr(),
        cos_PH.data_ptr(),
        sin_PH.data_ptr(),
        t,
        n,
        h,
        x_TNH.stride(0),
        int(inverse),
    )
    return y_TNH
