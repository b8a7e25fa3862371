"""Native `lockstep::linear`: weights packed in panels of 64 columns, K ascending, one accumulator
an output.

Bytes moved at one row: the packed weight, once. Layouts: docs/decisions/011.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.linear.packing import FLOAT_FORMATS, PANEL, PackedFormat, pack_into
from lockstep.kernels.linear.packing import pack as pack_pieces
from lockstep.kernels.native_library import DTYPE_CODE, address, native

__all__ = [
    "PANEL",
    "column_sum",
    "gemm",
    "linear",
    "linear_grad_input",
    "linear_grad_weight",
    "pack",
    "pack_temporary",
    "quantise_rows",
]

_STORE, _ACCUMULATE, _RESIDUAL, _SILU_MUL = range(4)


def pack(weight_NK: Tensor, bf16: bool, is_kept: bool) -> Tensor:
    """Weights that stay lie on huge pages."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    return pack_pieces([weight_NK], dtype) if is_kept else pack_temporary(weight_NK, dtype)


def pack_temporary(matrix_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """For one product of a backward pass."""
    num_bytes = FLOAT_FORMATS[dtype].num_bytes(*matrix_NK.shape)
    return pack_into(torch.empty(num_bytes // dtype.itemsize, dtype=dtype), matrix_NK)


def gemm(
    x_TK: Tensor,
    packed: Tensor,
    n: int,
    *,
    fmt: PackedFormat | None = None,
    bias_N: Tensor | None = None,
    column_bias: Tensor | None = None,
    norm_weight_K: Tensor | None = None,
    eps: float = 0.0,
    residual_TN: Tensor | None = None,
    silu_mul: bool = False,
    segments: int = 1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
) -> Tensor:
    """epilogue(norm?(x) W^T + b): x (T, K) times a packed weight, `n` outputs, in one native call.

    `fmt` None: packed floats of x's dtype. `norm_weight_K`, in x's dtype: rows go through rms_norm
    first. At most one epilogue: `residual_TN` (out's dtype; may be `out`) is added, `silu_mul`
    gates the interleaved halves, `accumulate` adds to `out`. `bias_N` is rounded to x's dtype;
    `column_bias` comes from `pack_bias`. Bits are those of the separate ops.
    """
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    t, k = x_TK.shape
    y_TN = torch.empty(t, n, dtype=out_dtype or x_TK.dtype) if out is None else out
    if bias_N is not None:
        column_bias = bias_N.to(x_TK.dtype).float()
    if residual_TN is not None:
        assert residual_TN.dtype == y_TN.dtype, f"{residual_TN.dtype} added to {y_TN.dtype}"
        epilogue = _RESIDUAL
    else:
        epilogue = _SILU_MUL if silu_mul else _ACCUMULATE if accumulate else _STORE
    native().ls_gemm(
        y_TN.data_ptr(),
        DTYPE_CODE[y_TN.dtype],
        y_TN.stride(0),
        x_TK.data_ptr(),
        DTYPE_CODE[x_TK.dtype],
        x_TK.stride(0),
        address(norm_weight_K),
        eps,
        packed.data_ptr(),
        FLOAT_FORMATS[x_TK.dtype].code if fmt is None else fmt.code,
        address(column_bias),
        address(residual_TN),
        0 if residual_TN is None else residual_TN.stride(0),
        t,
        n,
        k,
        segments,
        epilogue,
    )
    return y_TN


def quantise_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Activations as products with 8-bit weights take them: int8 (T, K), and fp32 scales (T, B)."""
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    t, k = x_TK.shape
    q_TK = torch.empty(t, k, dtype=torch.int8)
    scales_TB = torch.empty(t, -(-k // 64), dtype=torch.float32)
    native().ls_quantise_rows(
        q_TK.data_ptr(),
        scales_TB.data_ptr(),
        x_TK.data_ptr(),
        DTYPE_CODE[x_TK.dtype],
        t,
        k,
        x_TK.stride(0),
    )
    return q_TK, scales_TB


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    packed: Tensor,
    bias_N: Tensor | None,
    segments: int,
    fp32_out: bool,
) -> Tensor:
    return gemm(
        x_TK,
        packed,
        weight_NK.shape[0],
        bias_N=bias_N,
        segments=segments,
        out_dtype=torch.float32 if fp32_out else x_TK.dtype,
    )


def linear_grad_input(dy_TN: Tensor, weight_NK: Tensor) -> Tensor:
    return gemm(dy_TN, pack_temporary(weight_NK.t(), dy_TN.dtype), weight_NK.shape[1])


def linear_grad_weight(dy_TN: Tensor, x_TK: Tensor) -> Tensor:
    dw_NK = torch.empty(dy_TN.shape[1], x_TK.shape[1], dtype=torch.float32)
    return add_grad_weight(dw_NK, dy_TN, x_TK, accumulate=False)


def add_grad_weight(dw_NK: Tensor, dy_TN: Tensor, x_TK: Tensor, *, accumulate: bool) -> Tensor:
    """dW = or += dY^T X, in place; T is summed in ascending order, onto what is there."""
    dy_TN, x_TK = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (dy_TN, x_TK))
    native().ls_grad_weight(
        dw_NK.data_ptr(),
        dy_TN.data_ptr(),
        x_TK.data_ptr(),
        DTYPE_CODE[x_TK.dtype],
        x_TK.shape[0],
        *dw_NK.shape,
        dy_TN.stride(0),
        x_TK.stride(0),
        int(accumulate),
    )
    return dw_NK


def add_into(y: Tensor, x: Tensor) -> None:
    """y += x, both contiguous and of one dtype."""
    native().ls_add(y.data_ptr(), x.data_ptr(), y.data_ptr(), DTYPE_CODE[y.dtype], y.numel())


def column_sum(dy_TN: Tensor) -> Tensor:
    dy_TN = dy_TN.contiguous()
    total_N = torch.empty(dy_TN.shape[1], dtype=torch.float32)
    native().ls_column_sum(
        total_N.data_ptr(),
        dy_TN.data_ptr(),
        DTYPE_CODE[dy_TN.dtype],
        dy_TN.shape[0],
        dy_TN.shape[1],
    )
    return total_N
