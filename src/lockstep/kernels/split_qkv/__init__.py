"""q, k and v heads out of one product, with q/k norm and rotary position on the way.

T tokens, N query heads, K key/value heads, H head dim, X = (N + 2K) H; tables hold P positions by
H/2 angles, fp32. One op forward and one backward, so that autograd neither slices nor concatenates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import dispatch
from lockstep.kernels.split_qkv import cpu, reference

__all__ = ["split_qkv"]


def _fake(qkv: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, num_kv = rest[-2:]
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv)
    q, k, v = (qkv.new_empty(len(qkv), heads, head_dim) for heads in (num_heads, num_kv, num_kv))
    return q, k, v


def _fake_backward(dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor | None, *rest: Any) -> Any:
    size = 0 if rest[3] is None else dq.shape[2]
    norms = (dq.new_empty(size, dtype=torch.float32) for _ in range(2))
    num_heads = dq.shape[1] + 2 * dk.shape[1]
    return (dq.new_empty(len(dq), num_heads * dq.shape[2]), *norms)


_split = dispatch.define(
    "split_qkv(Tensor qkv, Tensor positions, Tensor cos, Tensor sin, Tensor? q_norm,"
    " Tensor? k_norm, float eps, int num_heads, int num_kv_heads) -> (Tensor, Tensor, Tensor)",
    reference=reference.split_qkv,
    native=cpu.split_qkv,
    fake=_fake,
)
_split_backward = dispatch.define(
    "split_qkv_backward(Tensor dq, Tensor dk, Tensor dv, Tensor? qkv, Tensor positions, Tensor cos,"
    " Tensor sin, Tensor? q_norm, Tensor? k_norm, float eps) -> (Tensor, Tensor, Tensor)",
    reference=reference.split_qkv_backward,
    native=cpu.split_qkv_backward,
    fake=_fake_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, *tensors, ctx.eps, _num_heads, _num_kv_heads = inputs
    has_norms = tensors[-1] is not None  # only their gradients need what came in
    ctx.save_for_backward(qkv if has_norms else None, *tensors)


def _backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    qkv, *tables, q_norm, k_norm = ctx.saved_tensors
    dqkv, *dnorms = _split_backward(dq, dk, dv, qkv, *tables, q_norm, k_norm, ctx.eps)
    dq_norm, dk_norm = (
        dw.to(w.dtype) if w is not None else None
        for w, dw in zip((q_norm, k_norm), dnorms, strict=True)
    )
    return dqkv, None, None, None, dq_norm, dk_norm, None, None, None


dispatch.autograd("split_qkv", backward=_backward, setup_context=_setup_context)


def split_qkv(
    qkv_TX: Tensor,
    positions_T: Tensor,
    cos_PH: Tensor,
    sin_PH: Tensor,
    *,
    q_norm_H: Tensor | None,
    k_norm_H: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """q (T, N, H), k (T, K, H) and v (T, K, H); either both norms or none. Differentiable."""
    return _split(
        qkv_TX, positions_T, cos_PH, sin_PH, q_norm_H, k_norm_H, eps, num_heads, num_kv_heads
    )
