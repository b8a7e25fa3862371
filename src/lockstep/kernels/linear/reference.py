"""y = x W^T + b with fp32 accumulation: the specification of `lockstep::linear` and its gradients.

Shapes: T rows, K inputs, N outputs. With `segments` = 8, K is cut into 8 equal (even-length) pieces
whose sums are joined by a fixed binary tree, ((0+1)+(2+3))+((4+5)+(6+7)), so that cutting K over 1,
2, 4 or 8 tensor-parallel ranks cannot change a bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

SEGMENTS = 8


def segment_length(k: int, segments: int) -> int:
    """Elements of K in each segment but the last: even, so that bf16 pairs are never split."""
    return k if segments == 1 else -(-k // (2 * segments)) * 2


def linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    packed: Tensor,
    bias_N: Tensor | None,
    segments: int,
    fp32_out: bool,
) -> Tensor:
    x = x_TK.float()
    weight = weight_NK.to(x_TK.dtype).float()
    length = segment_length(x.shape[1], segments)
    partial = [
        x[:, start : start + length] @ weight[:, start : start + length].t()
        for start in range(0, segments * length, length)
    ]
    while len(partial) > 1:
        partial = [left + right for left, right in zip(partial[::2], partial[1::2], strict=True)]
    y = partial[0] if bias_N is None else partial[0] + bias_N.to(x_TK.dtype).float()
    return y if fp32_out else y.to(x_TK.dtype)


def linear_grad_input(dy_TN: Tensor, weight_NK: Tensor) -> Tensor:
    return (dy_TN.float() @ weight_NK.to(dy_TN.dtype).float()).to(dy_TN.dtype)


def linear_grad_weight(dy_TN: Tensor, x_TK: Tensor) -> Tensor:
    """fp32, whatever the inputs' dtype: it goes to fp32 master weights."""
    return dy_TN.float().t() @ x_TK.float()


def column_sum(dy_TN: Tensor) -> Tensor:
    return dy_TN.float().sum(0)


def pack(weight_NK: Tensor, bf16: bool, is_kept: bool) -> Tensor:
    """The reference reads the weight itself; its packed form is empty."""
    return torch.empty(0, dtype=torch.bfloat16 if bf16 else torch.float32)
