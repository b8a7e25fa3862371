"""Moving a scale per channel out of a projection's input and into its weight.

x W^T = (x / s) (W s)^T, and x / s costs nothing where x comes from an op that can absorb 1 / s: the
norm before q, k, v and before gate, up; the rows of v before o; the rows of up before down. The
model computes the same function and any loader reads it, for only values of weights change.

v's rows serve every query head of their group, so there one scale serves all of them. A norm's
weight is stored in few bits: it is rounded first, and the scale taken to be what rounding left of
it, so that the fold itself is exact. Legend: K inputs of a projection, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.compress.layer_stream import projection
from lockstep.compress.statistics import READERS
from lockstep.models.layers import Linear, RMSNorm
from lockstep.models.llama import Layer

_PRODUCERS = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.o_proj": "self_attn.v_proj",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.down_proj": "mlp.up_proj",
}


def foldable_scale(layer: Layer, reader: str, scale_K: Tensor, *, stored: torch.dtype) -> Tensor:
    """The scale nearest to `scale_K` that can be folded exactly, for the input of `reader`."""
    producer = layer.get_submodule(_PRODUCERS[reader])
    if isinstance(producer, RMSNorm):
        norm_K = producer.weight.float()
        rounded_K = (norm_K / scale_K).to(stored).float()
        return torch.where(rounded_K == 0, 1.0, norm_K / rounded_K)
    assert isinstance(producer, Linear)
    outputs = producer.weight.shape[0]
    if outputs == len(scale_K):
        return scale_K
    head_dim = layer.self_attn.head_dim
    per_group = scale_K.view(outputs // head_dim, -1, head_dim).amax(1, keepdim=True)
    return per_group.expand(-1, len(scale_K) // outputs, -1).reshape(-1)


@torch.no_grad()
def fold(layer: Layer, reader: str, scale_K: Tensor) -> None:
    """Divide the input of `reader` by a foldable scale, and multiply all that read it."""
    producer = layer.get_submodule(_PRODUCERS[reader])
    if isinstance(producer, RMSNorm):
        producer.weight.div_(scale_K)
    else:
        assert isinstance(producer, Linear)
        rows_N = _rows_scale(layer, producer, scale_K)
        producer.weight.div_(rows_N[:, None])
        if producer.bias is not None:
            producer.bias.div_(rows_N)
    for name in READERS[reader]:
        projection(layer, name).weight.mul_(scale_K)


def _rows_scale(layer: Layer, producer: Linear, scale_K: Tensor) -> Tensor:
    outputs = producer.weight.shape[0]
    if outputs == len(scale_K):
        return scale_K
    head_dim = layer.self_attn.head_dim
    return scale_K.view(outputs // head_dim, -1, head_dim)[:, 0].reshape(-1)
