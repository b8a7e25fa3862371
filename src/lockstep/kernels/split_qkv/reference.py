"""q (T, N, H) and k (T, K, H), each head normed (where weights are given) and rotated, and v (T, K,
H), out of one product (T, (N + 2K) H): the composition of `rms_norm` and `rope`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.rms_norm import reference as rms_norm
from lockstep.kernels.rope import reference as rope


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
    q, k, v = _heads(qkv_TX, num_heads, num_kv_heads)
    if q_norm_H is not None and k_norm_H is not None:
        q, k = rms_norm.rms_norm(q, q_norm_H, eps), rms_norm.rms_norm(k, k_norm_H, eps)
    q = rope.rope(q, positions_T, cos_PH, sin_PH, False)
    k = rope.rope(k, positions_T, cos_PH, sin_PH, False)
    return q, k, v.contiguous()


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
    """dqkv (T, X) in its dtype, and the gradients (H,) of both norms' weights in fp32 (empty where
    there are none; then `qkv_TX` is not needed either).
    """
    dq = rope.rope(dq_TNH, positions_T, cos_PH, sin_PH, True)
    dk = rope.rope(dk_TKH, positions_T, cos_PH, sin_PH, True)
    dq_norm_H, dk_norm_H = torch.empty(0), torch.empty(0)
    if q_norm_H is not None and k_norm_H is not None:
        assert qkv_TX is not None
        q, k, _ = _heads(qkv_TX, dq.shape[1], dk.shape[1])
        dq_norm_H, dk_norm_H = _norm_weight_grad(dq, q, eps), _norm_weight_grad(dk, k, eps)
        dq = rms_norm.rms_norm_backward(dq, q, q_norm_H, eps)[0]
        dk = rms_norm.rms_norm_backward(dk, k, k_norm_H, eps)[0]
    return torch.cat((dq, dk, dv_TKH), dim=1).flatten(1), dq_norm_H, dk_norm_H


def _norm_weight_grad(dy: Tensor, x: Tensor, eps: float) -> Tensor:
    dy, x = dy.float(), x.float()
    return (dy * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).sum((0, 1))


def _heads(qkv_TX: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    heads = qkv_TX.unflatten(1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return q, k, v
