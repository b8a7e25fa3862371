"""Native attention. One kernel serves both forms: the packed form lays its keys and values into
pages first.

Each (token, head) row runs the same arithmetic whatever shares the call: key tiles of 128 from
position 0 upwards, scores summed over H ascending, online softmax, values added key by key. Bytes
moved: every visible page once for each block of rows that shares a K/V head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.attention.reference import BLOCK, padded_head_dim
from lockstep.kernels.native_library import DTYPE_CODE, address, native


def attention_packed(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens_S1: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    lengths = cu_seqlens_S1.diff()
    blocks_S = (lengths + (BLOCK - 1)) // BLOCK
    ends = blocks_S.cumsum(0)
    num_blocks, widest = (int(ends[-1]), int(blocks_S.max())) if len(lengths) else (0, 0)
    tables_SB = ((ends - blocks_S)[:, None] + torch.arange(widest)).to(torch.int32)
    _, num_kv, head_dim = k_TKH.shape
    k_pages = q_TNH.new_empty(num_blocks, num_kv, head_dim, BLOCK)
    v_pages = q_TNH.new_empty(num_blocks, num_kv, BLOCK, padded_head_dim(head_dim))
    lse_TN = torch.empty(q_TNH.shape[:2], dtype=torch.float32)
    contexts_S = torch.zeros_like(lengths, dtype=torch.int32)
    _write(k_TKH, v_TKH, k_pages, v_pages, tables_SB, cu_seqlens_S1, contexts_S)
    o = _attend(
        q_TNH, k_pages, v_pages, tables_SB, cu_seqlens_S1, contexts_S, lse_TN, scale, window
    )
    return o, lse_TN


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
) -> tuple[Tensor, Tensor, Tensor]:
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
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables_SB: Tensor,
    query_starts_S1: Tensor,
    context_lens_S: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    _write(k_TKH, v_TKH, k_pages, v_pages, block_tables_SB, query_starts_S1, context_lens_S)
    return _attend(
        q_TNH,
        k_pages,
        v_pages,
        block_tables_SB,
        query_starts_S1,
        context_lens_S,
        None,
        scale,
        window,
    )


def _write(
    k_TKH: Tensor,
    v_TKH: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables_SB: Tensor,
    starts_S1: Tensor,
    contexts_S: Tensor,
) -> None:
    k_TKH, v_TKH = k_TKH.contiguous(), v_TKH.contiguous()
    native().ls_kv_write(
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        k_TKH.data_ptr(),
        v_TKH.data_ptr(),
        DTYPE_CODE[k_TKH.dtype],
        tables_SB.data_ptr(),
        starts_S1.data_ptr(),
        contexts_S.data_ptr(),
        contexts_S.shape[0],
        k_TKH.shape[1],
        k_TKH.shape[2],
        v_pages.shape[3],
        tables_SB.stride(0),
        k_TKH.shape[0],
    )


def _attend(
    q_TNH: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables_SB: Tensor,
    starts_S1: Tensor,
    contexts_S: Tensor,
    lse_TN: Tensor | None,
    scale: float,
    window: int,
) -> Tensor:
    q_TNH = q_TNH.contiguous()
    o_TNH = torch.empty_like(q_TNH)
    native().ls_attention(
        o_TNH.data_ptr(),
        address(lse_TN),
        q_TNH.data_ptr(),
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        DTYPE_CODE[q_TNH.dtype],
        tables_SB.data_ptr(),
        starts_S1.data_ptr(),
        contexts_S.data_ptr(),
        contexts_S.shape[0],
        q_TNH.shape[1],
        k_pages.shape[1],
        q_TNH.shape[2],
        v_pages.shape[3],
        tables_SB.stride(0),
        scale,
        window,
    )
    return o_TNH
