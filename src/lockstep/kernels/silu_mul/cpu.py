"""Native silu_mul: element by element with one exp for every lane, so no element depends on its
place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.native_library import DTYPE_CODE, native


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    native().ls_silu_mul(
        y.data_ptr(), gate.data_ptr(), up.data_ptr(), DTYPE_CODE[gate.dtype], gate.numel()
    )
    return y


def silu_mul_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dy, gate, up = dy.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    native().ls_silu_mul_backward(
        dgate.data_ptr(),
        dup.data_ptr(),
        dy.data_ptr(),
        gate.data_ptr(),
        up.data_ptr(),
        DTYPE_CODE[gate.dtype],
        gate.numel(),
    )
    return dgate, dup
