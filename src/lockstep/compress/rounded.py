"""A layer with its weights rounded, computing what the quantised kernels will.

Weights are given as floats, activations rounded per token and block as `lockstep.kernels.linear`
specifies. The sums are plain fp32 products, so results agree with the kernels' closely, not to the
bit; what calibration and gate ask is how far the rounding leads, not its last bit.

Legend: T tokens, K inputs, N outputs, B blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.compress.layer_stream import projection
from lockstep.core.quantization import ACTIVATION_BLOCK
from lockstep.kernels.linear.formats import QuantizedWeight
from lockstep.models.layers import Linear
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
    """Replace projections of the layer, by name, with their rounded selves."""
    for name, weight in weights.items():
        layer.set_submodule(name, _RoundedLinear(projection(layer, name), weight))


class _RoundedLinear(Linear):
    def __init__(self, base: Linear, weight: QuantizedWeight) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(weight.dequantize(), requires_grad=False)
        self.bias, self.segments, self.packs = base.bias, base.segments, base.packs
        self._rounds_activations = weight.scheme.activation_bits == 8

    def forward(self, x_TK: Tensor) -> Tensor:
        x = round_activations(x_TK) if self._rounds_activations else x_TK.float()
        return F.linear(x, self.weight, self.bias).to(x_TK.dtype)
