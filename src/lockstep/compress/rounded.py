"""What rounding does to activations, as numbers, and to a layer, as the layer that will be served.

Legend: T tokens, K inputs, B blocks, I inputs a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.compress.layer_stream import projection
from lockstep.core.quantization import ACTIVATION_BLOCK
from lockstep.kernels.linear.formats import QuantizedWeight
from lockstep.models.layers import set_weight
from lockstep.models.llama import Layer


def round_activations(x_TK: Tensor) -> Tensor:
    """fp32 values of activations quantised to 8 bits per token and block; NaN where a block is not
    finite.
    """
    tokens, inputs = x_TK.shape
    padded = F.pad(x_TK.float(), (0, -inputs % ACTIVATION_BLOCK))
    x_TBI = padded.view(tokens, -1, ACTIVATION_BLOCK)
    largest_TB1 = x_TBI.abs().amax(2, keepdim=True)
    factor_TB1 = 127 / largest_TB1
    q_TBI = torch.where(factor_TB1.isfinite(), (x_TBI * factor_TB1).round(), 0.0)
    scale_TB1 = torch.where(largest_TB1.isfinite(), largest_TB1 / 127, torch.nan)
    return (q_TBI * scale_TB1).view(tokens, -1)[:, :inputs]


def round_layer(layer: Layer, weights: dict[str, QuantizedWeight]) -> None:
    """Give projections of the layer, by name, their rounded weights: from here on it computes as
    the served model will, by the same kernels.
    """
    for name, weight in weights.items():
        set_weight(projection(layer, name), weight)
