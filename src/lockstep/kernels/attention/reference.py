"""Causal attention with grouped K/V heads, packed and paged: the specification.

Legend: T tokens, N query heads, K key/value heads (N a multiple of K), H head dim, X = (N + 2K) H,
S sequences, B blocks a sequence, L keys. o = softmax(scale q k^T + mask) v; token i of a sequence
sees keys max(0, i - window + 1) .. i (window 0: all), keys and values as their pages give them back
(`pages`).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from lockstep.kernels.attention.pages import BLOCK, KVFormat, format_of, quantise, rounded_to
from lockstep.kernels.split_qkv import reference as split


def attention_packed(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens_S1: Tensor,
    scale: float,
    window: int,
    kv_format: KVFormat,
) -> tuple[Tensor, Tensor]:
    """o (T, N, H) in q's dtype, and the log-sum-exp of each row's scores (T, N) in fp32."""
    k, v = rounded_to(k_TKH, kv_format), rounded_to(v_TKH, kv_format)
    return _attend_packed(q_TNH, k, v, cu_seqlens_S1, scale, window)


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
    """dq, dk, dv by differentiating the specification itself, straight through the rounding of keys
    and values.
    """
    with torch.enable_grad():
        seen = (q_TNH.float(), rounded_to(k_TKH, kv_format), rounded_to(v_TKH, kv_format))
        inputs = [x.detach().requires_grad_() for x in seen]
        o, _ = _attend_packed(*inputs, cu_seqlens_S1, scale, window)
        gradients = torch.autograd.grad(o, inputs, do_TNH.float())
    dq, dk, dv = (g.to(q_TNH.dtype) for g in gradients)
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
    """Norm and rotate, write each chunk's keys and values into its pages, attend over all its
    tokens so far. Rows of no sequence give 0.
    """
    q_TNH, k_TKH, v_TKH = split.split_qkv(
        qkv_TX, positions_T, cos_PH, sin_PH, q_norm_H, k_norm_H, eps, num_heads, num_kv_heads
    )
    head_dim = q_TNH.shape[2]
    o_TNH = torch.zeros_like(q_TNH)
    bounds = query_starts_S1.tolist()
    contexts = [0] * (len(bounds) - 1) if context_lens_S is None else context_lens_S.tolist()
    for s, context in enumerate(contexts):
        chunk = slice(bounds[s], bounds[s + 1])
        length = context + bounds[s + 1] - bounds[s]
        num_blocks = -(-length // BLOCK)
        if block_tables_SB is None:
            table = bounds[s] // BLOCK + s + torch.arange(num_blocks)
        else:
            table = block_tables_SB[s, :num_blocks].long()
        places = torch.arange(context, length)
        _write(k_TKH[chunk], k_pages, k_scales, table[places // BLOCK], places % BLOCK, is_key=True)
        _write(
            v_TKH[chunk], v_pages, v_scales, table[places // BLOCK], places % BLOCK, is_key=False
        )
        k = _read(k_pages, k_scales, table, head_dim, is_key=True)[:length]
        v = _read(v_pages, v_scales, table, head_dim, is_key=False)[:length]
        o_TNH[chunk] = _attend(q_TNH[chunk], k, v, context, scale, window)[0]
    return o_TNH.flatten(1)


def _tokens_first(pages: Tensor, *, is_key: bool) -> Tensor:
    """A view of pages as (block, 16, K, H); of paired values as (block, 8, 2, K, Hp)."""
    if pages.dtype == torch.float32:
        return pages.permute(0, 3, 1, 2) if is_key else pages.permute(0, 2, 1, 3)
    return pages.permute(0, 3, 1, 2, 4) if is_key else pages.permute(0, 2, 4, 1, 3)


def _write(
    x_LKH: Tensor,
    pages: Tensor,
    scales: Tensor | None,
    blocks: Tensor,
    slots: Tensor,
    *,
    is_key: bool,
) -> None:
    if scales is not None:
        x_LKH, scale_LK = quantise(x_LKH, format_of(pages))
        scales[blocks, :, slots] = scale_LK
    view, x_LKH = _tokens_first(pages, is_key=is_key), x_LKH.to(pages.dtype)
    if pages.dtype == torch.float8_e4m3fn:  # indexing does not know the dtype
        view, x_LKH = view.view(torch.uint8), x_LKH.view(torch.uint8)
    if pages.dtype == torch.float32:
        view[blocks, slots, :, : x_LKH.shape[2]] = x_LKH
    elif is_key:
        view[blocks, slots] = x_LKH.unflatten(2, (-1, 2))
    else:
        view[blocks, slots // 2, slots % 2, :, : x_LKH.shape[2]] = x_LKH


def _read(
    pages: Tensor, scales: Tensor | None, table: Tensor, head_dim: int, *, is_key: bool
) -> Tensor:
    """fp32 keys or values (L, K, H) of the table's blocks in order."""
    raw = pages.view(torch.uint8)[table].view(pages.dtype)
    x = _tokens_first(raw, is_key=is_key).float()
    if pages.dtype != torch.float32:
        x = x.flatten(3) if is_key else x.flatten(1, 2)
    x_LKH = x.flatten(0, 1)[..., :head_dim]
    if scales is None:
        return x_LKH
    return x_LKH * scales[table].permute(0, 2, 1).flatten(0, 1)[..., None]


def _attend_packed(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens_S1: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    outputs = [q_TNH.new_empty(0, *q_TNH.shape[1:])]
    sums = [torch.empty(0, q_TNH.shape[1])]
    for start, end in itertools.pairwise(cu_seqlens_S1.tolist()):
        o, lse = _attend(q_TNH[start:end], k_TKH[start:end], v_TKH[start:end], 0, scale, window)
        outputs.append(o)
        sums.append(lse)
    return torch.cat(outputs), torch.cat(sums)


def _attend(
    q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, context: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    group = q_TNH.shape[1] // k_LKH.shape[1]
    wide = torch.promote_types(q_TNH.dtype, torch.float32)
    k, v = (x.to(wide).repeat_interleave(group, dim=1) for x in (k_LKH, v_LKH))
    scores_NTL = torch.einsum("tnh,lnh->ntl", q_TNH.to(wide), k) * scale
    rows = torch.arange(context, context + q_TNH.shape[0])[:, None]
    keys = torch.arange(k.shape[0])[None, :]
    hidden = keys > rows
    if window:
        hidden |= keys <= rows - window
    scores_NTL = scores_NTL.masked_fill(hidden, float("-inf"))
    o_TNH = torch.einsum("ntl,lnh->tnh", scores_NTL.softmax(-1), v)
    return o_TNH.to(q_TNH.dtype), scores_NTL.logsumexp(-1).t()
