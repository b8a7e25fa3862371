"""The parts a transformer is made of, each a thin module over one kernel.

A module owns its parameters under Hugging Face's names. Parameters may be fp32 masters; the compute
dtype is that of the activations, and packing rounds the master, so training and serving compute the
same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lockstep.core.model_config import RopeConfig
from lockstep.core.quantization import WeightScheme
from lockstep.kernels.embedding import embedding
from lockstep.kernels.embedding.quantized import quantized_embedding
from lockstep.kernels.linear import (
    SEGMENTS,
    Norm,
    PackCache,
    QuantizedWeight,
    Weight,
    can_pack_together,
    is_fused,
    linear,
    quantize_rtn,
    release,
)
from lockstep.kernels.linear.trained import Adapter, Projection, can_train
from lockstep.kernels.rms_norm import rms_norm
from lockstep.kernels.rope import rope


class Linear(nn.Module):
    """y = x W^T + b. `row_parallel` marks the products whose K tensor parallelism cuts: summed in 8
    segments.
    """

    weight: Weight
    """A parameter, or quantised and frozen."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, row_parallel: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.segments = SEGMENTS if row_parallel else 1
        self.packs = PackCache()
        self.scheme: WeightScheme | None = None
        """How a float weight is rounded before each product, for quantisation-aware training."""

    @property
    def is_adapted(self) -> bool:
        """Whether `adapt` changes anything."""
        return False

    def adapt(self, x_TK: Tensor, y_TN: Tensor) -> Tensor:
        """What an adapter makes of the product y of x."""
        return y_TN

    def projection(self) -> Projection | None:
        """The product as plain data; None where it is more than that: quantised, or adapted by
        code.
        """
        return None if self.is_adapted else self._projection(None)

    def _projection(self, adapter: Adapter | None) -> Projection | None:
        if self.scheme is not None or isinstance(self.weight, QuantizedWeight):
            return None
        return Projection(
            weight_NK=self.weight,
            bias_N=self.bias,
            packs=self.packs,
            segments=self.segments,
            adapter=adapter,
        )

    def forward(
        self, x_TK: Tensor, residual_TN: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """x W^T + b, added to `residual_TN` if there is one; written to `out` only in the fused
        path.
        """
        y_TN = linear(
            x_TK,
            self.weight,
            self.bias,
            packs=self.packs,
            scheme=self.scheme,
            residual_TN=None if self.is_adapted else residual_TN,
            segments=self.segments,
            out=out,
        )
        if not self.is_adapted:
            return y_TN
        y_TN = self.adapt(x_TK, y_TN)
        return y_TN if residual_TN is None else residual_TN + y_TN


def trained(x: Tensor, *modules: Linear) -> list[Projection] | None:
    """The modules' products for a step with gradients in the fewest nodes; None: take modules."""
    if not can_train(x):
        return None
    projections = [module.projection() for module in modules]
    found = [projection for projection in projections if projection is not None]
    return found if len(found) == len(modules) else None


def side_by_side(
    x_TD: Tensor, modules: Sequence[Linear], norm: RMSNorm, packs: PackCache
) -> Tensor:
    """Outputs of several projections of norm(x) in one row: one product where formats agree."""
    weights = [module.weight for module in modules]
    is_adapted = any(module.is_adapted for module in modules)
    if can_pack_together(weights) and not is_adapted:
        biases = [module.bias for module in modules if module.bias is not None]
        return linear(
            x_TD, weights, biases, packs=packs, scheme=modules[0].scheme, norm=norm.prologue()
        )
    h_TD = norm(x_TD)
    if not is_fused(h_TD):
        return torch.cat([module(h_TD) for module in modules], 1)
    sizes = [module.weight.shape[0] for module in modules]
    y_TX = torch.empty(h_TD.shape[0], sum(sizes), dtype=h_TD.dtype)
    for module, place in zip(modules, y_TX.split(sizes, 1), strict=True):
        module(h_TD, out=place)
    return y_TX


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim."""

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features))
        self.eps = eps

    def prologue(self) -> Norm:
        """For a product that begins with this norm."""
        return Norm(self.weight, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    """Token table (V, D). Holds the packs of its weight for models that tie it to the last
    projection.
    """

    weight: Weight

    def __init__(self, vocab_size: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, features))
        self.packs = PackCache()
        self.scheme: WeightScheme | None = None

    def forward(self, tokens_T: Tensor, dtype: torch.dtype) -> Tensor:
        if self.scheme is not None or isinstance(self.weight, QuantizedWeight):
            return quantized_embedding(
                self.weight, tokens_T, dtype=dtype, packs=self.packs, scheme=self.scheme
            )
        return embedding(tokens_T=tokens_T, weight_VD=self.weight, dtype=dtype)


_num_weights_set = 0


def num_weights_set() -> int:
    """How often `set_weight` was called in this process: a quantised weight is no parameter, so
    nothing else tells that a model got another.
    """
    return _num_weights_set


def set_weight(module: Linear | Embedding, weight: Weight) -> None:
    """Give a module another weight: a parameter, or a quantised one, which is no parameter."""
    global _num_weights_set
    _num_weights_set += 1
    module._parameters.pop("weight", None)
    module.__dict__.pop("weight", None)
    if isinstance(weight, QuantizedWeight):
        module.__dict__["weight"] = weight
    else:
        module.register_parameter("weight", weight)
    module.packs = PackCache()


def take_over(module: Linear, base: Linear) -> None:
    """Make `module` compute as `base` does, with the same weight, bias and packs."""
    set_weight(module, base.weight)
    module.bias, module.segments = base.bias, base.segments
    module.packs, module.scheme = base.packs, base.scheme


def quantize_weights(model: nn.Module, scheme: WeightScheme, *, on_the_fly: bool = False) -> None:
    """Round a model's projections and table to `scheme`, once, or anew before each product, their
    parameters staying float.
    """
    for name, module in model.named_modules():
        if not isinstance(module, Linear | Embedding) or isinstance(module.weight, QuantizedWeight):
            continue
        chosen = scheme.of_tensor(f"{name}.weight", tuple(module.weight.shape))
        if chosen is not None and on_the_fly:
            module.scheme = chosen
        elif chosen is not None:
            set_weight(module, quantize_rtn(module.weight, chosen))


def quantized_weights(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """The weights that are no parameters, by name."""
    for name, module in model.named_modules():
        if isinstance(weight := vars(module).get("weight"), QuantizedWeight):
            yield f"{name}.weight", weight


def float_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All weights by name, quantised ones dequantised to fp32, one at a time."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
    for name, weight in quantized_weights(model):
        yield name, weight.dequantize()


def release_weights(root: nn.Module) -> None:
    """Give up the weights under `root` that are packed; a step without gradients needs no more.

    A float token table stays: its rows are looked up.
    """
    for module in root.modules():
        for cache in (value for value in vars(module).values() if isinstance(value, PackCache)):
            cache.pin()
    for module in root.modules():
        is_table = isinstance(module, Embedding) and not isinstance(module.weight, QuantizedWeight)
        if isinstance(module, Linear | Embedding) and not is_table:
            packs = module.packs
            set_weight(module, release(module.weight))
            module.packs = packs


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
