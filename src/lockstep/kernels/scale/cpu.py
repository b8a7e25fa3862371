"""Native scale."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.native_library import DTYPE_CODE, native


def scale(x: Tensor, factor: float) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    scale_into(y, x, factor)
    return y


def scale_into(y: Tensor, x: Tensor, factor: float) -> None:
    """y = factor * x, both contiguous; y may be x."""
    native().ls_scale(y.data_ptr(), x.data_ptr(), DTYPE_CODE[x.dtype], factor, x.numel())
