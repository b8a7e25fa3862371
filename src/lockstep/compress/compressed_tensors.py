"""Writing a compressed-tensors checkpoint: what Hugging Face transformers and vLLM load.

| scheme | format | tensors of a projection |
|---|---|---|
| int8 | int-quantized | weight int8, weight_scale (N, 1) |
| int4 | pack-quantized | weight_packed int32 (N, K/8), weight_scale (N, G), weight_shape; with zero
points weight_zero_point int32 (N/8, G) |
| fp8 | float-quantized | weight e4m3, weight_scale (N, 1) |

Codes are signed there, q - 2^(bits - 1), and packed with the offset added again, the first code in
the lowest bits; zero points are packed along N. Layout: https://github.com/vllm-project/
compressed-tensors. Activations of int8 models are declared dynamic per token. Our kernels round
them in blocks of 64, which is finer; int4 models declare none, for others run them so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.compress.methods import STORED
from lockstep.core.files import write_json
from lockstep.core.quantization import WeightScheme
from lockstep.kernels.linear.formats import QuantizedWeight
from lockstep.models.export import generation_config_of
from lockstep.models.loading import Checkpoint
from lockstep.models.shards import ShardWriter

SHARD_BYTES = 10**9
"""A shard is in memory while it fills."""
_CODES_PER_WORD = 8


class CompressedTensorsWriter:
    """A folder: config, tokenizer, and safetensors in shards."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, scheme: WeightScheme) -> None:
        self._folder, self._checkpoint, self._scheme = folder, checkpoint, scheme
        self._shards = ShardWriter(folder, SHARD_BYTES)

    def add(self, name: str, value: Tensor | QuantizedWeight) -> None:
        if isinstance(value, QuantizedWeight):
            for tensor_name, tensor in tensors_of(name, value).items():
                self._shards.add(tensor_name, tensor)
        else:
            self._shards.add(name, value.to(STORED))

    def finish(self) -> None:
        self._shards.finish()
        config = self._checkpoint.config
        described = config.to_hf(dtype="bfloat16")
        described["quantization_config"] = quantization_config(self._scheme)
        write_json(self._folder / "config.json", described)
        generation = generation_config_of(config, self._checkpoint.generation_config)
        write_json(self._folder / "generation_config.json", generation)
        self._checkpoint.tokenizer().save(self._folder)


def tensors_of(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors that stand for the weight `<module>.weight`."""
    scheme = weight.scheme
    stem = name.removesuffix("weight")
    tensors = {f"{stem}weight_scale": weight.scales_NG}
    if scheme.kind == "float":
        return {name: weight.values_NK, **tensors}
    if scheme.bits == 8:
        return {name: (weight.values_NK.int() - 128).to(torch.int8), **tensors}
    tensors[f"{stem}weight_packed"] = pack_nibbles(weight.values_NK)
    tensors[f"{stem}weight_shape"] = torch.tensor(weight.shape)
    if weight.minimums_NG is not None:
        tensors[f"{stem}weight_zero_point"] = pack_nibbles(weight.minimums_NG.t()).t()
    return tensors


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes from 0 to 15 (R, C) as int32 words (R, C/8), the first code in the lowest bits."""
    padded = F.pad(codes.int(), (0, -codes.shape[1] % _CODES_PER_WORD))
    words = padded.view(len(codes), -1, _CODES_PER_WORD) << torch.arange(0, 32, 4, dtype=torch.int)
    return words.sum(-1, dtype=torch.int64).to(torch.int32)  # wraps: the top bit is the sign


def quantization_config(scheme: WeightScheme) -> Mapping[str, Any]:
    """The `quantization_config` of config.json."""
    weights = {
        "num_bits": scheme.bits,
        "type": scheme.kind,
        "symmetric": scheme.offset == "symmetric",
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "dynamic": False,
        "observer": "minmax",
    }
    activations = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    layout = {"int8": "int-quantized", "int4": "pack-quantized", "float8": "float-quantized"}
    declares_activations = scheme.kind == "int" and scheme.bits == 8
    return {
        "quant_method": "compressed-tensors",
        "format": layout[f"{scheme.kind}{scheme.bits}"],
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations if declares_activations else None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
