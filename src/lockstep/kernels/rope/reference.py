"""Rotary position embedding in the half-split form of Hugging Face's Llama (Su et al. 2021, eq. 34,
permuted).

For each head and pair (x1, x2) = (x[i], x[i + H/2]): y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin.
Rotating by -sin is the inverse, hence the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope(
    x_TNH: Tensor, positions_T: Tensor, cos_PH: Tensor, sin_PH: Tensor, inverse: bool
) -> Tensor:
    cos, sin = cos_PH[positions_T, None].float(), sin_PH[positions_T, None].float()
    sin = -sin if inverse else sin
    x1, x2 = x_TNH.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x_TNH.dtype)
