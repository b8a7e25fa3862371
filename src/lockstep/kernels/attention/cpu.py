"""Native attention: one kernel for both forms; the packed form lays its keys and values into pages
first.

Each (token, head) row runs the same arithmetic whatever shares the call: ranges of 1,024 keys from
position 0, joined in order, each in tiles of 128, scores summed over H ascending, online softmax,
values added in order of keys. bf16 multiplies in pairs and rounds weights to bf16; sums are fp32.
Bytes moved: every visible page once for each 48 rows that share a K/V head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.kernels.attention.pages import (
    BLOCK,
    KVFormat,
    KVPages,
    empty_pages,
    format_of,
    native_format,
    rounded_to,
)
from lockstep.kernels.native_library import DTYPE_CODE, address, native

_FORMAT_CODE = {"fp32": 0, "bf16": 1, "int8": 2, "fp8": 3}


def temporary_pages(
    num_tokens: int, num_seqs: int, num_kv_heads: int, head_dim: int, kv_format: KVFormat
) -> KVPages:
    """Room for sequences laid end to end, each from block start / 16 + its number on."""

    def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    return empty_pages(num_tokens // BLOCK + num_seqs + 1, num_kv_heads, head_dim, kv_format, empty)


def attention_packed(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens_S1: Tensor,
    scale: float,
    window: int,
    kv_format: KVFormat,
) -> tuple[Tensor, Tensor]:
    q_TNH, k_TKH, v_TKH = (x.contiguous() for x in (q_TNH, k_TKH, v_TKH))
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_kv_heads, num_seqs = k_TKH.shape[1], len(cu_seqlens_S1) - 1
    pages = temporary_pages(num_tokens, num_seqs, num_kv_heads, head_dim, kv_format)
    o_TNH = torch.empty_like(q_TNH)
    lse_TN = torch.empty(num_tokens, num_heads, dtype=torch.float32)
    native().ls_attention(
        o_TNH.data_ptr(),
        lse_TN.data_ptr(),
        q_TNH.data_ptr(),
        k_TKH.data_ptr(),
        v_TKH.data_ptr(),
        DTYPE_CODE[q_TNH.dtype],
        num_heads * head_dim,
        num_kv_heads * head_dim,
        pages.k.data_ptr(),
        pages.v.data_ptr(),
        address(pages.k_scales),
        address(pages.v_scales),
        _FORMAT_CODE[kv_format],
        *(None, None, None, None, None, 0, 0.0),  # heads come normed and rotated
        *(None, 0),  # blocks in order
        cu_seqlens_S1.data_ptr(),
        None,
        num_tokens,
        num_seqs,
        num_heads,
        num_kv_heads,
        head_dim,
        scale,
        window,
    )
    return o_TNH, lse_TN


def attention_packed_backward(
    do_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    o_TNH: Tensor,
    lse_TN: Tensor,
    cu_seqlens_S1: Tensor,
    scale: float,
    window: int,
    kv_format: KVFormat,
) -> tuple[Tensor, Tensor, Tensor]:
    if kv_format != native_format(q_TNH.dtype):  # straight through the rounding
        k_TKH, v_TKH = (rounded_to(x, kv_format).to(x.dtype) for x in (k_TKH, v_TKH))
    do, q, k, v, o = (x.contiguous() for x in (do_TNH, q_TNH, k_TKH, v_TKH, o_TNH))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    native().ls_attention_backward(
        *(x.data_ptr() for x in (dq, dk, dv, do, q, k, v, o, lse_TN)),
        DTYPE_CODE[q.dtype],
        cu_seqlens_S1.data_ptr(),
        len(cu_seqlens_S1) - 1,
        q.shape[1],
        k.shape[1],
        q.shape[2],
        q.shape[0],
        scale,
        window,
    )
    return dq, dk, dv


def attention_paged(
    qkv_TX: Tensor,
    positions_T: Tensor,
    cos_PH: Tensor,
    sin_PH: Tensor,
    q_norm_H: Tensor | None,
    k_norm_H: Tensor | None,
    eps: float,
    k_pages: Tensor,
    v_pages: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    block_tables_SB: Tensor | None,
    query_starts_S1: Tensor,
    context_lens_S: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int,
) -> Tensor:
    num_tokens, head_dim = len(qkv_TX), qkv_TX.shape[1] // (num_heads + 2 * num_kv_heads)
    assert qkv_TX.stride(1) == 1, "a token's heads lie side by side"
    o_TX = qkv_TX.new_empty(num_tokens, num_heads * head_dim)
    q_address, head_bytes = qkv_TX.data_ptr(), head_dim * qkv_TX.dtype.itemsize
    native().ls_attention(
        o_TX.data_ptr(),
        None,
        q_address,
        q_address + num_heads * head_bytes,
        q_address + (num_heads + num_kv_heads) * head_bytes,
        DTYPE_CODE[qkv_TX.dtype],
        qkv_TX.stride(0),
        qkv_TX.stride(0),
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        address(k_scales),
        address(v_scales),
        _FORMAT_CODE[format_of(k_pages)],
        positions_T.data_ptr(),
        cos_PH.data_ptr(),
        sin_PH.data_ptr(),
        address(q_norm_H),
        address(k_norm_H),
        0 if q_norm_H is None else DTYPE_CODE[q_norm_H.dtype],
        eps,
        address(block_tables_SB),
        0 if block_tables_SB is None else block_tables_SB.stride(0),
        query_starts_S1.data_ptr(),
        address(context_lens_S),
        num_tokens,
        len(query_starts_S1) - 1,
        num_heads,
        num_kv_heads,
        head_dim,
        scale,
        window,
    )
    return o_TX
