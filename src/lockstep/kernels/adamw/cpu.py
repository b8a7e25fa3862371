"""Native AdamW: p, m, v and g read and p, m and v written in one pass, element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.adamw.reference import PIECE
from lockstep.kernels.native_library import native


def adamw(
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    grad_scale: float,
    decay: float,
    beta1: float,
    beta2: float,
    step_size: float,
    root_correction2: float,
    eps: float,
) -> None:
    tensors = (weight, mean, square, gradient)
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in tensors)
    native().ls_adamw(
        *(x.data_ptr() for x in tensors),
        weight.numel(),
        grad_scale,
        decay,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        step_size,
        root_correction2,
        eps,
    )


def sums_of_squares(x: Tensor) -> Tensor:
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    sums = torch.empty(-(-x.numel() // PIECE), dtype=torch.float64)
    native().ls_sum_of_squares(sums.data_ptr(), x.data_ptr(), x.numel())
    return sums
