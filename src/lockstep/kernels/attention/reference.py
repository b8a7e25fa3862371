"""Causal attention with grouped K/V heads, packed and paged: the specification.

Legend: T tokens, N query heads, K key/value heads (N a multiple of K), H head dim, S sequences, B
blocks a sequence. o = softmax(scale q k^T + mask) v; token i of a sequence sees keys max(0, i -
window + 1) .. i (window 0: all). Pages hold 16 tokens: keys transposed as (block, K, H, 16), so
that scores are computed 16 keys at a time; values as (block, K, 16, Hp), Hp being H rounded up to
16.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

BLOCK = 16


def padded_head_dim(head_dim: int) -> int:
    return -(-head_dim // 16) * 16


def attention_packed(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cu_seqlens_S1: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """o (T, N, H) in q's dtype, and the log-sum-exp of each row's scores (T, N) in fp32."""
    outputs = [q_TNH.new_empty(0, *q_TNH.shape[1:])]
    sums = [torch.empty(0, q_TNH.shape[1])]
    bounds = cu_seqlens_S1.tolist()
    for start, end in itertools.pairwise(bounds):
        o, lse = _attend(q_TNH[start:end], k_TKH[start:end], v_TKH[start:end], 0, scale, window)
        outputs.append(o)
        sums.append(lse)
    return torch.cat(outputs), torch.cat(sums)


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
    """dq, dk, dv by differentiating the specification itself."""
    with torch.enable_grad():
        inputs = [x.detach().float().requires_grad_() for x in (q_TNH, k_TKH, v_TKH)]
        o, _ = attention_packed(*inputs, cu_seqlens_S1, scale, window)
        gradients = torch.autograd.grad(o, inputs, do_TNH.float())
    dq, dk, dv = (g.to(q_TNH.dtype) for g in gradients)
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
    """Write each chunk's keys and values into its pages, then attend over all its tokens so far."""
    head_dim = q_TNH.shape[2]
    outputs = [q_TNH.new_empty(0, *q_TNH.shape[1:])]
    bounds = query_starts_S1.tolist()
    for s, context in enumerate(context_lens_S.tolist()):
        chunk = slice(bounds[s], bounds[s + 1])
        length = context + bounds[s + 1] - bounds[s]
        places = torch.arange(context, length)
        blocks, slots = block_tables_SB[s, places // BLOCK].long(), places % BLOCK
        k_pages[blocks, :, :, slots] = k_TKH[chunk]
        v_pages[blocks, :, slots, :head_dim] = v_TKH[chunk]
        table = block_tables_SB[s, : -(-length // BLOCK)].long()
        k = k_pages[table].permute(0, 3, 1, 2).flatten(0, 1)[:length]
        v = v_pages[table][..., :head_dim].permute(0, 2, 1, 3).flatten(0, 1)[:length]
        outputs.append(_attend(q_TNH[chunk], k, v, context, scale, window)[0])
    return torch.cat(outputs)


def _attend(
    q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, context: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    group = q_TNH.shape[1] // k_LKH.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k_LKH, v_LKH))
    scores_NTL = torch.einsum("tnh,lnh->ntl", q_TNH.float(), k) * scale
    rows = torch.arange(context, context + q_TNH.shape[0])[:, None]
    keys = torch.arange(k.shape[0])[None, :]
    hidden = keys > rows
    if window:
        hidden |= keys <= rows - window
    scores_NTL = scores_NTL.masked_fill(hidden, float("-inf"))
    o_TNH = torch.einsum("ntl,lnh->tnh", scores_NTL.softmax(-1), v)
    return o_TNH.to(q_TNH.dtype), scores_NTL.logsumexp(-1).t()
