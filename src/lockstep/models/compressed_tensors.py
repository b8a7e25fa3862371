"""Quantised weights in Hugging Face folders, as the compressed-tensors format stores them.

`config.json` has a `quantization_config` that says how; a quantised `NAME.weight` lies in
`NAME.weight` (int8 or float8) with `NAME.weight_scale`, or, at 4 bits, in `NAME.weight_packed` with
`weight_scale`, `weight_shape` and, where groups are asymmetric, `weight_zero_point`. Values of 4
bits lie in int32 words, lowest bits first: weights along K, zero points along N; stored unsigned,
which for symmetric groups and zero points means 8 was added. Nothing is rounded here.

Source: https://github.com/vllm-project/compressed-tensors, compressors/quantized_compressors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import CheckpointError
from lockstep.core.json_fields import JsonFields
from lockstep.core.quantization import WeightScheme, parse_scheme
from lockstep.kernels.linear import QuantizedWeight

PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
"""Tensors beside or instead of `weight`."""
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_PER_WORD = 8

Read = Callable[[str], Tensor]


def scheme_of_config(config: Mapping[str, Any], *, where: str) -> WeightScheme | None:
    """The scheme that `quantization_config` describes, None where there is none."""
    section = config.get("quantization_config")
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise CheckpointError(f"{where}: quantization_config must be an object, got {section!r}")
    method = section.get("quant_method")
    if method != "compressed-tensors":
        raise CheckpointError(
            f"{where}: weights quantised with {method!r} are not supported; use the checkpoint in "
            "float or bfloat16, in compressed-tensors, or a GGUF file"
        )
    if section.get("format") not in FORMATS:
        raise CheckpointError(
            f"{where}: format {section.get('format')!r} is not supported; use {', '.join(FORMATS)}"
        )
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise CheckpointError(f"{where}: config_groups must hold one group, got {groups!r}")
    (group,) = groups.values()
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise CheckpointError(f"{where}: config_groups has no weights")
    has_activations = group.get("input_activations") is not None
    return _scheme(JsonFields(group["weights"], where=where), has_activations)


def _scheme(weights: JsonFields, has_activations: bool) -> WeightScheme:
    bits, kind = weights.count("num_bits"), weights.get("type", "int")
    strategy, symmetric = weights.get("strategy"), weights.flag("symmetric", True)
    if (kind, bits, strategy, symmetric) == ("float", 8, "channel", True):
        return parse_scheme("fp8")
    if (kind, bits, strategy, symmetric) == ("int", 8, "channel", True):
        return parse_scheme("int8" if has_activations else "int8-a16")
    if (kind, bits, strategy) == ("int", 4, "group"):
        size = weights.count("group_size")
        if size in (32, 64, 128):
            return parse_scheme(f"int4-g{size}" + ("" if symmetric else "-asym"))
    raise CheckpointError(
        f"{weights.where}: weights of {bits} bits, type {kind!r}, strategy {strategy!r}, symmetric "
        f"{symmetric}, group_size {weights.get('group_size')} are not supported; use int8 or fp8 "
        "by channel, or int4 by groups of 32, 64 or 128"
    )


def logical_shapes(stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors a model has, from those of the tensors a folder has."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in stored.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_packed":
            if len(shape) != 2:
                raise CheckpointError(f"{name} has shape {shape}, expected two dimensions")
            shapes[f"{module}.weight"] = (shape[0], shape[1] * _PER_WORD)
        elif leaf not in PARTS:
            shapes[name] = shape
    return shapes


def read_weight(
    module: str, stored: Mapping[str, tuple[int, ...]], read: Read, scheme: WeightScheme
) -> QuantizedWeight | None:
    """The quantised weight of a module, None where its weight is float."""
    if f"{module}.weight_scale" not in stored:
        return None
    scales = read(f"{module}.weight_scale")
    if scales.dim() == 1:
        scales = scales[:, None]
    packed = f"{module}.weight_packed" in stored
    values = read(f"{module}.weight_packed" if packed else f"{module}.weight")
    zero_points = None
    if packed:
        values = _unpack(values, f"{module}.weight_packed")
    elif scheme.kind == "int":
        values = _expect(values, torch.int8, f"{module}.weight").view(torch.uint8) ^ 128
    else:
        _expect(values, torch.float8_e4m3fn, f"{module}.weight")
    n, k = values.shape
    if scheme.offset == "zero_point":
        name = f"{module}.weight_zero_point"
        if name not in stored:
            raise CheckpointError(f"{name} is missing, but groups are asymmetric")
        zero_points = _unpack(read(name).t(), name).t()[:n].contiguous()
    expected = (n, scheme.num_groups(k))
    for what, tensor in (("weight_scale", scales), ("weight_zero_point", zero_points)):
        if tensor is not None and tuple(tensor.shape) != expected:
            raise CheckpointError(
                f"{module}.{what} has shape {tuple(tensor.shape)}, expected {expected}"
            )
    if not scales.is_floating_point():
        raise CheckpointError(f"{module}.weight_scale is {scales.dtype}, expected floats")
    return QuantizedWeight(
        scheme=scheme, values_NK=values, scales_NG=scales.contiguous(), minimums_NG=zero_points
    )


def _unpack(words: Tensor, name: str) -> Tensor:
    """Nibbles of int32 words along the last dim, as bytes."""
    _expect(words, torch.int32, name)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (words[..., None] >> shifts & 15).to(torch.uint8).flatten(-2)


def _expect(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    if tensor.dtype != dtype or tensor.dim() != 2:
        raise CheckpointError(
            f"{name} is {tensor.dtype} with {tensor.dim()} dimensions, expected {dtype} with 2"
        )
    return tensor.contiguous()
