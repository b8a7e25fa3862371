"""The parts a transformer is made of, each a thin module over one kernel.

A module owns its parameters under Hugging Face's names. Parameters may be fp32 masters; the compute
dtype is that of the activations, and packing rounds the master, so training and serving compute the
same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lockstep.core.model_config import RopeConfig
from lockstep.kernels.embedding import embedding
from lockstep.kernels.linear import SEGMENTS, PackCache, linear
from lockstep.kernels.rms_norm import rms_norm
from lockstep.kernels.rope import rope


class Linear(nn.Module):
    """y = x W^T + b. `row_parallel` marks the products whose K tensor parallelism cuts: summed in 8
    segments.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, row_parallel: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.segments = SEGMENTS if row_parallel else 1
        self.packs = PackCache()

    def forward(self, x_TK: Tensor) -> Tensor:
        return linear(x_TK, self.weight, self.bias, packs=self.packs, segments=self.segments)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim."""

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    """Token table (V, D). Holds the packs of its weight for models that tie it to the last
    projection.
    """

    def __init__(self, vocab_size: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, features))
        self.packs = PackCache()

    def forward(self, tokens_T: Tensor, dtype: torch.dtype) -> Tensor:
        return embedding(tokens_T=tokens_T, weight_VD=self.weight, dtype=dtype)


class RotaryTable:
    """cos and sin of every position's angles, (P, H/2) fp32, grown by doubling as longer contexts
    come.
    """

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        self._frequencies, self._magnitude = rope_frequencies(config, head_dim)
        self._cos = self._sin = torch.empty(0, head_dim // 2)

    @property
    def num_positions(self) -> int:
        """Positions in the table; a larger one is another table."""
        return len(self._cos)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin."""
        return self._cos, self._sin

    def apply(self, x_TNH: Tensor, positions_T: Tensor) -> Tensor:
        return rope(x_TNH, positions_T, self._cos, self._sin)

    def reserve(self, num_positions: int) -> None:
        """Make sure positions 0 .. num_positions - 1 are in the table."""
        if num_positions <= len(self._cos):
            return
        size = max(256, 1 << (num_positions - 1).bit_length())
        angles = torch.arange(size, dtype=torch.float64)[:, None] * self._frequencies
        self._cos = (angles.cos() * self._magnitude).float()
        self._sin = (angles.sin() * self._magnitude).float()


def rope_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angles per position, (H/2,) fp64, and the factor on cos and sin.

    linear: Chen et al. 2023; yarn: Peng et al. 2023, section 3; llama3: the smoothed split by
    wavelength of Llama 3.1.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64)
    plain = config.theta ** (-pairs / head_dim)
    if config.kind == "linear":
        return plain / config.factor, 1.0
    if config.kind == "llama3":
        wavelength = 2 * math.pi / plain
        turns = config.original_max_position / wavelength
        smooth = (turns - config.low_freq_factor) / (
            config.high_freq_factor - config.low_freq_factor
        )
        smooth = smooth.clamp(0.0, 1.0)
        return (1 - smooth) * plain / config.factor + smooth * plain, 1.0
    if config.kind == "yarn":
        low = _yarn_dim(config.beta_fast, config, head_dim)
        high = _yarn_dim(config.beta_slow, config, head_dim)
        if config.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = (
            (torch.arange(head_dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)
        ).clamp(0, 1)
        magnitude = config.attention_factor
        if magnitude is None:
            magnitude = 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0
        return plain / config.factor * ramp + plain * (1 - ramp), magnitude
    return plain, 1.0


def _yarn_dim(turns: float, config: RopeConfig, head_dim: int) -> float:
    """Index of the dim that turns `turns` times within the original context."""
    ratio = config.original_max_position / (turns * 2 * math.pi)
    return head_dim * math.log(ratio) / (2 * math.log(config.theta))
