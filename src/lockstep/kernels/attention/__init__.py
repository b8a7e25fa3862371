"""Causal attention over packed sequences (training) and over pages (serving), bit for bit the same.

T tokens, N query heads, K key/value heads, H head dim, X = (N + 2K) H, S sequences, B blocks a
sequence. `window` 0 means none. `kv_format` is what keys and values are rounded to when written;
the gradient goes straight through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import dispatch
from lockstep.kernels.attention import cpu, reference
from lockstep.kernels.attention.cpu import temporary_pages
from lockstep.kernels.attention.pages import (
    BLOCK,
    KVFormat,
    KVPages,
    bytes_per_block,
    empty_pages,
    native_format,
    padded_head_dim,
)

__all__ = [
    "BLOCK",
    "KVFormat",
    "KVPages",
    "attention_packed",
    "attention_paged",
    "attention_scored",
    "bytes_per_block",
    "empty_pages",
    "native_format",
    "padded_head_dim",
]

_packed = dispatch.define(
    "attention_packed(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, float scale, int window,"
    " str kv_format) -> (Tensor, Tensor)",
    reference=reference.attention_packed,
    native=cpu.attention_packed,
    fake=lambda q, *_: (q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)),
)
_packed_backward = dispatch.define(
    "attention_packed_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " Tensor cu_seqlens, float scale, int window, str kv_format) -> (Tensor, Tensor, Tensor)",
    reference=reference.attention_packed_backward,
    native=cpu.attention_packed_backward,
    fake=lambda dout, q, k, v, *_: (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
    ),
)
_paged = dispatch.define(
    "attention_paged(Tensor qkv, Tensor positions, Tensor cos, Tensor sin, Tensor? q_norm,"
    " Tensor? k_norm, float eps, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor(c!)? k_scales,"
    " Tensor(d!)? v_scales, Tensor? block_tables, Tensor query_starts, Tensor? context_lens,"
    " int num_heads, int num_kv_heads, float scale, int window) -> Tensor",
    reference=reference.attention_paged,
    native=cpu.attention_paged,
    fake=lambda qkv, *rest: qkv.new_empty(
        len(qkv), qkv.shape[1] // (rest[-4] + 2 * rest[-3]) * rest[-4]
    ),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, ctx.scale, ctx.window, ctx.kv_format = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)


def _backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv = _packed_backward(dout, *ctx.saved_tensors, ctx.scale, ctx.window, ctx.kv_format)
    return dq, dk, dv, None, None, None, None


dispatch.autograd("attention_packed", backward=_backward, setup_context=_setup_context)


def attention_packed(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens_S1: Tensor,
    *,
    scale: float,
    window: int = 0,
    kv_format: KVFormat | None = None,
) -> Tensor:
    """Causal attention within each sequence; sequence s is tokens cu_seqlens[s] .. cu_seqlens[s+1]
    (int32). Heads come normed and rotated. `kv_format` None keeps keys and values as they are.
    """
    kv_format = kv_format or native_format(q_TNH.dtype)
    return _packed(q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale, window, kv_format)[0]


def attention_paged(
    qkv_TX: Tensor,
    positions_T: Tensor,
    cos_PH: Tensor,
    sin_PH: Tensor,
    pages: KVPages,
    *,
    q_norm_H: Tensor | None,
    k_norm_H: Tensor | None,
    eps: float,
    block_tables_SB: Tensor | None,
    query_starts_S1: Tensor,
    context_lens_S: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Attention output (T, N * H) of chunks of sequences, from q, k and v heads as projected: they
    are normed and rotated, keys and values written into their pages (in place), then all rows
    attend. No gradient.

    Chunk s is tokens query_starts[s] .. query_starts[s+1] and stands after context_lens[s] tokens
    already in the pages that block_tables[s] lists in order; all three are int32, and a table's
    rows may lie apart. Without contexts all chunks are whole sequences; without tables sequence s
    has the blocks from query_starts[s] / 16 + s on. Rows behind the last chunk give 0.
    """
    return _paged(
        qkv_TX,
        positions_T,
        cos_PH,
        sin_PH,
        q_norm_H,
        k_norm_H,
        eps,
        pages.k,
        pages.v,
        pages.k_scales,
        pages.v_scales,
        block_tables_SB,
        query_starts_S1,
        context_lens_S,
        num_heads,
        num_kv_heads,
        scale,
        window,
    )


def attention_scored(
    qkv_TX: Tensor,
    positions_T: Tensor,
    cos_PH: Tensor,
    sin_PH: Tensor,
    *,
    q_norm_H: Tensor | None,
    k_norm_H: Tensor | None,
    eps: float,
    cu_seqlens_S1: Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int = 0,
    kv_format: KVFormat | None = None,
) -> Tensor:
    """`attention_packed` (T, N * H) from heads as projected, without a gradient: one pass, over
    pages that live only for the call.
    """
    head_dim = qkv_TX.shape[1] // (num_heads + 2 * num_kv_heads)
    num_seqs = len(cu_seqlens_S1) - 1
    kv_format = kv_format or native_format(qkv_TX.dtype)
    pages = temporary_pages(len(qkv_TX), num_seqs, num_kv_heads, head_dim, kv_format)
    return attention_paged(
        qkv_TX,
        positions_T,
        cos_PH,
        sin_PH,
        pages,
        q_norm_H=q_norm_H,
        k_norm_H=k_norm_H,
        eps=eps,
        block_tables_SB=None,
        query_starts_S1=cu_seqlens_S1,
        context_lens_S=None,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        scale=scale,
        window=window,
    )
