"""Native silu_mul: element by element with one exp for every lane, so no element depends on its
place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.native_library import DTYPE_CODE, address, native


def silu_mul(gate: Tensor, up: Tensor, *, out: Tensor | None = None) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate) if out is None else out
    native().ls_silu_mul(
        y.data_ptr(), gate.data_ptr(), up.data_ptr(), DTYPE_CODE[gate.dtype], gate.numel()
    )
    return y


def silu_mul_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dy, gate, up = dy.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    write_backward(dgate, dup, None, dy, gate, up)
    return dgate, dup


def write_backward(
    dgate: Tensor, dup: Tensor, y: Tensor | None, dy: Tensor, gate: Tensor, up: Tensor
) -> None:
    """Fills `dgate` and `dup` (rows of one stride), and `y`, if given, with the forward's output;
    the others are contiguous. `y` may be `dy`.
    """
    width = gate.shape[-1]
    native().ls_silu_mul_backward(
        dgate.data_ptr(),
        dup.data_ptr(),
        address(y),
        dy.data_ptr(),
        gate.data_ptr(),
        up.data_ptr(),
        DTYPE_CODE[gate.dtype],
        gate.numel() // max(width, 1),
        width,
        dgate.stride(0) if dgate.dim() > 1 else width,
    )
