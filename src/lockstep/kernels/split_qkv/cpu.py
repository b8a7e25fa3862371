"""Native split_qkv: each head normed, rotated and stored in one pass; q, k and v read and written
once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.native_library import DTYPE_CODE, address, native


def split_qkv(
    qkv_TX: Tensor,
    positions_T: Tensor,
    cos_PH: Tensor,
    sin_PH: Tensor,
    q_norm_H: Tensor | None,
    k_norm_H: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, head_dim = len(qkv_TX), qkv_TX.shape[1] // (num_heads + 2 * num_kv_heads)
    q_TNH = qkv_TX.new_empty(num_tokens, num_heads, head_dim)
    k_TKH = qkv_TX.new_empty(num_tokens, num_kv_heads, head_dim)
    v_TKH = qkv_TX.new_empty(num_tokens, num_kv_heads, head_dim)
    native().ls_split_qkv(
        q_TNH.data_ptr(),
        k_TKH.data_ptr(),
        v_TKH.data_ptr(),
        qkv_TX.data_ptr(),
        DTYPE_CODE[qkv_TX.dtype],
        qkv_TX.stride(0),
        positions_T.data_ptr(),
        cos_PH.data_ptr(),
        sin_PH.data_ptr(),
        address(q_norm_H),
        address(k_norm_H),
        0 if q_norm_H is None else DTYPE_CODE[q_norm_H.dtype],
        eps,
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
    )
    return q_TNH, k_TKH, v_TKH


def split_qkv_backward(
    dq_TNH: Tensor,
    dk_TKH: Tensor,
    dv_TKH: Tensor,
    qkv_TX: Tensor | None,
    positions_T: Tensor,
    cos_PH: Tensor,
    sin_PH: Tensor,
    q_norm_H: Tensor | None,
    k_norm_H: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq_TNH, dk_TKH, dv_TKH = (x.contiguous() for x in (dq_TNH, dk_TKH, dv_TKH))
    num_tokens, num_heads, head_dim = dq_TNH.shape
    num_kv_heads = dk_TKH.shape[1]
    norm_size = 0 if q_norm_H is None else head_dim
    dqkv_TX = dq_TNH.new_empty(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    dq_norm_H = torch.empty(norm_size, dtype=torch.float32)
    dk_norm_H = torch.empty(norm_size, dtype=torch.float32)
    turned = dq_TNH.new_empty(num_tokens, (num_heads + num_kv_heads) * norm_size)
    native().ls_split_qkv_backward(
        dqkv_TX.data_ptr(),
        dq_norm_H.data_ptr(),
        dk_norm_H.data_ptr(),
        turned.data_ptr(),
        dq_TNH.data_ptr(),
        dk_TKH.data_ptr(),
        dv_TKH.data_ptr(),
        address(qkv_TX),
        DTYPE_CODE[dq_TNH.dtype],
        0 if qkv_TX is None else qkv_TX.stride(0),
        positions_T.data_ptr(),
        cos_PH.data_ptr(),
        sin_PH.data_ptr(),
        address(q_norm_H),
        address(k_norm_H),
        0 if q_norm_H is None else DTYPE_CODE[q_norm_H.dtype],
        eps,
        num_tokens,
        num_heads,
        num_kv_heads,
        head_dim,
    )
    return dqkv_TX, dq_norm_H, dk_norm_H
