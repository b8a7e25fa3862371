"""y = x / sqrt(mean(x^2) + eps) * w, over the last dim, in fp32, rounded once. Zhang & Sennrich
2019, eq. 4.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    x = x_TD.float()
    w = weight_D.to(x_TD.dtype).float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w).to(x_TD.dtype)


def rms_norm_backward(
    dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """dx in x's dtype, dw in fp32. With r = 1/rms: dx = r (w dy - x r^2 mean(w dy x)); dw = sum_T
    dy x r.
    """
    x, dy = x_TD.float(), dy_TD.float()
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    wdy = weight_D.to(x_TD.dtype).float() * dy
    dx = r * (wdy - x * r.square() * (wdy * x).mean(-1, keepdim=True))
    return dx.to(x_TD.dtype), (dy * x * r).sum(0)
