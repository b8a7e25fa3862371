"""A quantised weight in its canonical, row-major form, and rounding a float weight into it.

A format is data on a weight: one class holds all of them, and `scheme` says how its tensors are to
be read. Kernels pack from this form; readers and writers of checkpoints translate to and from it.
Value of output n, input k, with group g = k // group_size:

    symmetric   s[n, g] * (u[n, k] - scheme.stored_offset)
    zero point  s[n, g] * (u[n, k] - z[n, g])
    minimum     s[n, g] * u[n, k] + m[n, g]
    fp8         s[n, 0] * e4m3(u[n, k])

where for k-quants s = super_scale * integer scale and m = -(super_minimum * integer minimum).
Legend: N outputs, K inputs, G groups a row, S super groups a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError
from lockstep.core.quantization import WeightScheme, parse_scheme

FP8 = torch.float8_e4m3fn
_ELEMENTS_AT_A_TIME = 1 << 20


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedWeight:
    """A weight (N, K) in one of the schemes."""

    scheme: WeightScheme
    values_NK: Tensor
    """Unsigned bytes; for fp8 float8_e4m3fn."""
    scales_NG: Tensor
    """fp16, bf16 or fp32 as the checkpoint has them; for k-quants integers."""
    minimums_NG: Tensor | None = None
    """Zero points (uint8), or minimums: floats; for k-quants integers."""
    super_scales_NS: Tensor | None = None
    super_minimums_NS: Tensor | None = None

    def __post_init__(self) -> None:
        n, k = self.values_NK.shape
        expected = (n, self.scheme.num_groups(k))
        assert self.scales_NG.shape == expected, f"{self.scales_NG.shape} scales, not {expected}"
        assert (self.minimums_NG is None) == (self.scheme.offset == "symmetric"), self.scheme

    @property
    def shape(self) -> torch.Size:
        return self.values_NK.shape

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by field name."""
        fields = (f.name for f in dataclasses.fields(self) if f.name != "scheme")
        return {name: getattr(self, name) for name in fields if getattr(self, name) is not None}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def describe(self) -> dict[str, Any]:
        """All but its numbers, as JSON can hold it."""
        tensors = {
            name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in self.tensors().items()
        }
        return {"scheme": self.scheme.name, "tensors": tensors}

    @classmethod
    def described(cls, description: Mapping[str, Any]) -> QuantizedWeight:
        """A weight without memory, of which `describe` said this."""
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, (dtype, shape) in description["tensors"].items()
        }
        return cls(scheme=parse_scheme(description["scheme"]), **tensors)

    def rows(self, index: Tensor) -> QuantizedWeight:
        """Some outputs, in another order or repeated."""
        return self._replace({name: tensor[index] for name, tensor in self.tensors().items()})

    def to(self, device: str) -> QuantizedWeight:
        return self._replace({name: t.to(device) for name, t in self.tensors().items()})

    def _replace(self, tensors: dict[str, Tensor]) -> QuantizedWeight:
        return dataclasses.replace(self, **tensors)  # type: ignore[arg-type]

    def group_scales(self) -> Tensor:
        """fp32 scale of each group, (N, G)."""
        scales = self.scales_NG.float()
        if self.super_scales_NS is None:
            return scales
        return _per_group(self.super_scales_NS, self.scheme) * scales

    def group_minimums(self) -> Tensor | None:
        """fp32 minimum of each group, (N, G), where the scheme adds one."""
        if self.scheme.offset != "minimum":
            return None
        assert self.minimums_NG is not None
        minimums = self.minimums_NG.float()
        if self.super_minimums_NS is None:
            return minimums
        return -(_per_group(self.super_minimums_NS, self.scheme) * minimums)

    def integers(self) -> Tensor:
        """fp32 whole numbers (N, K) that scales multiply: offset or zero points taken off. For fp8
        the unscaled values.
        """
        values = self.values_NK.float()
        if self.scheme.offset == "zero_point":
            assert self.minimums_NG is not None
            return values - self._per_input(self.minimums_NG.float())
        return values - self.scheme.stored_offset

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as floats: scale times integer, plus minimum, each rounded to fp32."""
        weight = self.integers().mul_(self._per_input(self.group_scales()))
        if (minimums := self.group_minimums()) is not None:
            weight += self._per_input(minimums)
        return weight.to(dtype)

    def _per_input(self, x_NG: Tensor) -> Tensor:
        if self.scheme.group_size is None:
            return x_NG
        return x_NG.repeat_interleave(self.scheme.group_size, 1)[:, : self.shape[1]]


def _per_group(x_NS: Tensor, scheme: WeightScheme) -> Tensor:
    assert scheme.super_group_size is not None
    assert scheme.group_size is not None
    return x_NS.float().repeat_interleave(scheme.super_group_size // scheme.group_size, 1)


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights of one scheme and K as one, outputs one after the other."""
    if len(weights) == 1:
        return weights[0]
    first, parts = weights[0], [weight.tensors() for weight in weights]
    return first._replace({name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def can_concatenate(weights: Sequence[QuantizedWeight]) -> bool:
    """Whether they share scheme, K and dtypes."""

    def kind(weight: QuantizedWeight) -> tuple[Any, ...]:
        dtypes = [tensor.dtype for tensor in weight.tensors().values()]
        return weight.scheme, weight.shape[1], dtypes

    return all(kind(weight) == kind(weights[0]) for weight in weights)


@torch.no_grad()
def quantize_rtn(weight_NK: Tensor, scheme: WeightScheme) -> QuantizedWeight:
    """Round to nearest: scales span each group's values, everything rounds half to even.

    Scales are fp16 by group and fp32 by channel. A value that is not finite makes its group NaN.
    Large weights are rounded some rows at a time, to bound the memory it takes.
    """
    n, k = weight_NK.shape
    rows = max(1, _ELEMENTS_AT_A_TIME // k)
    if n > rows:
        return concatenate([quantize_rtn(part, scheme) for part in weight_NK.split(rows)])
    w = weight_NK.float()
    if scheme.super_group_size and k % scheme.super_group_size:
        raise ConfigError(
            f"{scheme} needs a multiple of {scheme.super_group_size} inputs, the weight has {k}; "
            "use q8_0, q4_1 or int4"
        )
    size = scheme.group_size or k
    groups = torch.nn.functional.pad(w, (0, -k % size)).view(n, -1, size)
    if scheme.super_group_size:
        return _rtn_k_quant(groups, scheme)
    if scheme.kind == "float":
        scales = w.abs().amax(1, keepdim=True) / torch.finfo(FP8).max
        return QuantizedWeight(
            scheme=scheme, values_NK=_divide(w, scales).to(FP8), scales_NG=scales
        )
    minimums = None
    if scheme.offset == "symmetric":
        scales = _round_scales(groups.abs().amax(2) / _symmetric_span(scheme), scheme)
        q = _divide(groups, scales[..., None]).round_() + scheme.stored_offset
        low = 1 if scheme.bits == 8 else 0
    else:
        low = 0
        scales, minimums = _affine_parameters(groups, scheme)
        if scheme.offset == "minimum":
            q = _divide(groups - minimums[..., None].float(), scales[..., None]).round_()
        else:
            q = _divide(groups, scales[..., None]).round_() + minimums[..., None].float()
    return QuantizedWeight(
        scheme=scheme,
        values_NK=_bytes(q, low, (1 << scheme.bits) - 1)[:, :k],
        scales_NG=scales,
        minimums_NG=minimums,
    )


def _symmetric_span(scheme: WeightScheme) -> float:
    """What the largest magnitude of a group becomes. At 4 bits half a step beyond the largest
    positive value: one end of the group is cut by half a step, all else has a finer step.
    """
    return 127.0 if scheme.bits == 8 else (1 << (scheme.bits - 1)) - 0.5


def _affine_parameters(groups_NGS: Tensor, scheme: WeightScheme) -> tuple[Tensor, Tensor]:
    """Scales and minimums or zero points, (N, G)."""
    levels = (1 << scheme.bits) - 1
    low, high = groups_NGS.aminmax(dim=2)
    if scheme.offset == "minimum":
        return _round_scales((high - low) / levels, scheme), low.half()
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    scales = _round_scales((high - low) / levels, scheme)
    zero = _divide(-low, scales).round_()
    return scales, _bytes(zero, 0, levels)


def _rtn_k_quant(groups_NGS: Tensor, scheme: WeightScheme) -> QuantizedWeight:
    assert scheme.super_group_size is not None
    per_super = scheme.super_group_size // groups_NGS.shape[2]
    levels = (1 << scheme.bits) - 1
    minimums = super_minimums = None
    if scheme.offset == "minimum":
        low, high = groups_NGS.aminmax(dim=2)
        low = low.clamp(max=0.0)
        super_minimums, minimums = _second_level(-low, 63.0, per_super)
        super_scales, scales = _second_level((high - low) / levels, 63.0, per_super)
        scales, minimums = scales.to(torch.uint8), minimums.to(torch.uint8)
        floor = _per_group(super_minimums, scheme) * minimums.float()
        shifted = groups_NGS + floor[..., None]
    else:
        largest = groups_NGS.abs().amax(2) / _symmetric_span(scheme)
        super_scales, scales = _second_level(largest, 127.0, per_super)
        scales, shifted = scales.to(torch.int8), groups_NGS
    step = _per_group(super_scales, scheme) * scales.float()
    q = _divide(shifted, step[..., None]).round_() + scheme.stored_offset
    return QuantizedWeight(
        scheme=scheme,
        values_NK=_bytes(q, 0, levels),
        scales_NG=scales,
        minimums_NG=minimums,
        super_scales_NS=super_scales,
        super_minimums_NS=super_minimums,
    )


def _second_level(x_NG: Tensor, span: float, per_super: int) -> tuple[Tensor, Tensor]:
    """x as fp16 super scale times a whole number up to `span`."""
    supers = x_NG.view(x_NG.shape[0], -1, per_super)
    super_NS = (supers.amax(2) / span).half()
    integers = _divide(supers, super_NS[..., None]).round_().clamp_(0, span).nan_to_num_(0.0)
    return super_NS, integers.view(x_NG.shape)


def _round_scales(scales: Tensor, scheme: WeightScheme) -> Tensor:
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    return scales if scheme.group_size is None else scales.half()


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, 0 where the scale is 0."""
    scale = scale.float()
    return torch.where(scale == 0, 0.0, x / scale)


def _bytes(q: Tensor, low: int, high: int) -> Tensor:
    return q.nan_to_num_(low).clamp_(low, high).to(torch.uint8).flatten(1)
