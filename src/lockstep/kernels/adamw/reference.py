"""m = m + (1 - b1)(g - m); v = b2 v + (1 - b2) g^2; p = p (1 - rate decay) - rate / (1 - b1^t) m /
(sqrt(v) / sqrt(1 - b2^t) + eps): Loshchilov & Hutter 2019, alg. 2, in torch's form.
"""

from __future__ import annotations

import torch
from torch import Tensor

PIECE = 65_536


def adamw(
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    grad_scale: float,
    decay: float,
    beta1: float,
    beta2: float,
    step_size: float,
    root_correction2: float,
    eps: float,
) -> None:
    g = gradient * grad_scale
    mean.lerp_(g, 1.0 - beta1)
    square.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    weight.mul_(decay).addcdiv_(mean, square.sqrt() / root_correction2 + eps, value=-step_size)


def sums_of_squares(x: Tensor) -> Tensor:
    pieces = [piece.double().square().sum() for piece in x.reshape(-1).split(PIECE)]
    return torch.stack(pieces) if pieces else torch.zeros(0, dtype=torch.float64)
