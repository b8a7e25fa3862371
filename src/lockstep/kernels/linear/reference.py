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
    weights: list[Tensor],
    biases: list[Tensor],
    packed: Tensor,
    packed_bias: Tensor | None,
    segments: int,
    fp32_out: bool,
) -> Tensor:
    """The outputs of all weights side by side; reads the weights, not what is packed."""
    x = x_TK.float()
    weight = torch.cat([weight.to(x_TK.dtype).float() for weight in weights])
    length = segment_length(x.shape[1], segments)
    partial = [
        x[:, start : start + length] @ weight[:, start : start + length].t()
        for start in range(0, segments * length, length)
    ]
    y = join_segments(partial)
    if biases:
        y = y + torch.cat([bias.to(x_TK.dtype).float() for bias in biases])
    return y if fp32_out else y.to(x_TK.dtype)


def join_segments(partial: list[Tensor]) -> Tensor:
    """The fixed tree over 1 or 8 sums."""
    while len(partial) > 1:
        partial = [left + right for left, right in zip(partial[::2], partial[1::2], strict=True)]
    return partial[0]


def linear_grad_input(dy_TN: Tensor, weight_NK: Tensor) -> Tensor:
    return (dy_TN.float() @ weight_NK.to(dy_TN.dtype).float()).to(dy_TN.dtype)


def linear_grad_weight(dy_TN: Tensor, x_TK: Tensor) -> Tensor:
    """fp32, whatever the inputs' dtype: it goes to fp32 master weights."""
    return dy_TN.float().t() @ x_TK.float()


def column_sum(dy_TN: Tensor) -> Tensor:
    return dy_TN.float().sum(0)
