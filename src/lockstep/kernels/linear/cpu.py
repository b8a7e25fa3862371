"""Native `lockstep::linear`: weights packed in panels of 64 columns, K ascending, one accumulator
an output.

Bytes moved at one row: the packed weight, once. The packed layout is [panel][k][64] in fp32 and
[panel][k/2][64][2] in bf16 (pairs, as `vdpbf16ps` takes them), zero-padded in N and K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels import huge_pages
from lockstep.kernels.native_library import DTYPE_CODE, address, native

PANEL = 64


def pack(weight_NK: Tensor, bf16: bool, is_kept: bool) -> Tensor:
    """Weights that stay lie on huge pages."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    if not is_kept:
        return pack_temporary(weight_NK, dtype)
    return pack_into(huge_pages.empty((packed_size(weight_NK, dtype),), dtype), weight_NK)


def pack_temporary(matrix_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """For one product of a backward pass."""
    return pack_into(torch.empty(packed_size(matrix_NK, dtype), dtype=dtype), matrix_NK)


def packed_size(matrix_NK: Tensor, dtype: torch.dtype) -> int:
    """Elements of the packed form: N rounded up to a panel, K to a pair in bf16."""
    n, k = matrix_NK.shape
    return -(-n // PANEL) * PANEL * (k + k % 2 if dtype == torch.bfloat16 else k)


def pack_into(packed: Tensor, matrix_NK: Tensor) -> Tensor:
    """Pack a matrix that will be summed over its last dim; any strides."""
    native().ls_pack(
        packed.data_ptr(),
        DTYPE_CODE[packed.dtype],
        matrix_NK.data_ptr(),
        DTYPE_CODE[matrix_NK.dtype],
        *matrix_NK.shape,
        *matrix_NK.stride(),
    )
    return packed


def gemm(
    x_TK: Tensor,
    packed: Tensor,
    n: int,
    *,
    bias_N: Tensor | None = None,
    segments: int = 1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
) -> Tensor:
    """x (T, K) times a packed (N, K) matrix; `out` (T, N) is overwritten, or added to if
    `accumulate`.
    """
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    t, k = x_TK.shape
    y_TN = torch.empty(t, n, dtype=out_dtype or x_TK.dtype) if out is None else out
    if bias_N is not None:
        bias_N = bias_N.to(x_TK.dtype).float()
    native().ls_gemm(
        y_TN.data_ptr(),
        DTYPE_CODE[y_TN.dtype],
        x_TK.data_ptr(),
        DTYPE_CODE[x_TK.dtype],
        packed.data_ptr(),
        address(bias_N),
        t,
        n,
        k,
        x_TK.stride(0),
        y_TN.stride(0),
        segments,
        int(accumulate),
    )
    return y_TN


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
