"""y = silu(g) u, silu(g) = g / (1 + exp(-g)): the gated half of SwiGLU (Shazeer 2020, eq. 5), in
fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    g = gate.float()
    return (g * torch.sigmoid(g) * up.float()).to(gate.dtype)


def silu_mul_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """d gate = dy u s (1 + g (1 - s)) and d up = dy g s, with s = sigmoid(g)."""
    g, u, d = gate.float(), up.float(), dy.float()
    s = torch.sigmoid(g)
    return (d * u * s * (1 + g * (1 - s))).to(gate.dtype), (d * g * s).to(gate.dtype)
