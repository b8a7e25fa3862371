"""Causal attention over packed sequences (training) and over pages (serving), bit for bit the same.

T tokens, N query heads, K key/value heads, H head dim, S sequences, B blocks a sequence. `window` 0
means none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import dispatch
from lockstep.kernels.attention import cpu, reference
from lockstep.kernels.attention.reference import BLOCK, padded_head_dim

__all__ = ["BLOCK", "attention_packed", "attention_paged", "padded_head_dim"]

_packed = dispatch.define(
    "attention_packed(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, float scale, int window)"
    " -> (Tensor, Tensor)",
    reference=reference.attention_packed,
    native=cpu.attention_packed,
    fake=lambda q, k, v, cu_seqlens, scale, window: (
        q.new_empty(q.shape),
        q.new_empty(q.shape[:2], dtype=torch.float32),
    ),
)
_packed_backward = dispatch.define(
    "attention_packed_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " Tensor cu_seqlens, float scale, int window) -> (Tensor, Tensor, Tensor)",
    reference=reference.attention_packed_backward,
    native=cpu.attention_packed_backward,
    fake=lambda dout, q, k, v, *_: (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
    ),
)
_paged = dispatch.define(
    "attention_paged(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages,"
    " Tensor block_tables, Tensor query_starts, Tensor context_lens, float scale, int window)"
    " -> Tensor",
    reference=reference.attention_paged,
    native=cpu.attention_paged,
    fake=lambda q, *_: q.new_empty(q.shape),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, ctx.scale, ctx.window = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)


def _backward(ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv = _packed_backward(dout, *ctx.saved_tensors, ctx.scale, ctx.window)
    return dq, dk, dv, None, None, None


dispatch.autograd("attention_packed", backward=_backward, setup_context=_setup_context)


def attention_packed(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens_S1: Tensor,
    *,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Causal attention within each sequence; sequence s is tokens cu_seqlens[s] .. cu_seqlens[s+1]
    (int32).
    """
    return _packed(q_TNH, k_TKH, v_TKH, cu_seqlens_S1, scale, window)[0]


def attention_paged(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    block_tables_SB: Tensor,
    query_starts_S1: Tensor,
    context_lens_S: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Write the chunks' keys and values into their pages (in place), then attend. No gradient.

    Chunk s is tokens query_starts[s] .. query_starts[s+1] and stands after context_lens[s] tokens
    already in the pages that block_tables[s] lists in order; all three are int32.
    """
    return _paged(
        q_TNH,
        k_TKH,
        v_TKH,
        k_pages,
        v_pages,
        block_tables_SB,
        query_starts_S1,
        context_lens_S,
        scale,
        window,
    )
