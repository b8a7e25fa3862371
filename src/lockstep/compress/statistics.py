"""What calibration has to know of the inputs of a layer's projections.

Projections that read the same input share its statistics: q, k and v; gate and up. Legend: K inputs
of a projection, T calibration tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.compress.layer_stream import HiddenStates, LayerRunner
from lockstep.models.llama import Layer

READERS: dict[str, tuple[str, ...]] = {
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
"""The first projection that reads an input, and all that do."""

_SAMPLED_ROWS = 512


@dataclass(kw_only=True)
class InputStatistics:
    """One input over the calibration tokens, summed in fp32."""

    hessian_KK: Tensor
    """Sum of x x^T."""
    largest_K: Tensor
    """Largest magnitude of each."""
    mean_K: Tensor
    """Mean magnitude of each."""
    rows_TK: Tensor
    """Some of the tokens' inputs themselves, evenly spaced."""
    num_tokens: int = 0

    @property
    def importance_K(self) -> Tensor:
        """Mean square of each input."""
        return self.hessian_KK.diagonal() / max(self.num_tokens, 1)

    def scaled(self, scale_K: Tensor) -> InputStatistics:
        """Of the input divided by `scale_K`."""
        inverse = 1 / scale_K
        return InputStatistics(
            hessian_KK=self.hessian_KK * inverse[:, None] * inverse,
            largest_K=self.largest_K * inverse,
            mean_K=self.mean_K * inverse,
            rows_TK=self.rows_TK * inverse,
            num_tokens=self.num_tokens,
        )


def collect(runner: LayerRunner, layer: Layer, states: HiddenStates) -> dict[str, InputStatistics]:
    """Statistics under the names in READERS, of one run over all calibration sequences."""
    gathered: dict[str, InputStatistics] = {}
    length = states.x_SLD.shape[1]
    step = max(1, len(states) * length // _SAMPLED_ROWS)
    kept: dict[str, list[Tensor]] = {name: [] for name in READERS}

    def observe(name: str, x_TK: Tensor) -> None:
        if name not in READERS:
            return
        x = x_TK.float()
        size = x.shape[1]
        if name not in gathered:
            zeros = torch.zeros(size)
            gathered[name] = InputStatistics(
                hessian_KK=torch.zeros(size, size),
                largest_K=zeros,
                mean_K=zeros.clone(),
                rows_TK=zeros,
            )
        stats = gathered[name]
        stats.hessian_KK.addmm_(x.t(), x)
        stats.largest_K = torch.maximum(stats.largest_K, x.abs().amax(0))
        stats.mean_K += x.abs().sum(0)
        kept[name].append(x[(-stats.num_tokens) % step :: step].clone())
        stats.num_tokens += len(x)

    runner.observe(layer, states, observe)
    for name, stats in gathered.items():
        stats.mean_K /= stats.num_tokens
        stats.rows_TK = torch.cat(kept[name])
    return gathered
