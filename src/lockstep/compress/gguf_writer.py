"""Writing a compressed model as one GGUF file: what llama.cpp loads, and Lockstep too.

The way back from `lockstep.models.gguf_model`: names, the order of q's and k's rows in architecture
`llama`, rope scaling, the tokenizer. Everything that is no matrix is kept in fp32, the token table
in Q8_0. Tensors are written as they come, so the file is never in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor

from lockstep.compress.gguf_blocks import BLOCK, BLOCK_BYTES, gguf_type, to_blocks
from lockstep.core.errors import ConfigError
from lockstep.core.model_config import ModelConfig
from lockstep.core.quantization import WeightScheme
from lockstep.kernels.linear.formats import QuantizedWeight
from lockstep.models.gguf_model import ARCHITECTURES, LAYER_NAMES, OUTER_NAMES, ROPE_FACTORS
from lockstep.models.layers import rope_frequencies
from lockstep.models.loading import Checkpoint
from lockstep.text.gguf_metadata import tokenizer_metadata

TABLE_SCHEME = "q8_0"
"""Token table and last projection, as llama.cpp keeps them beside 4-bit weights."""
_FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7}  # llama.cpp's LLAMA_FTYPE


class GgufModelWriter:
    """One file. Tensors are added in the order of `names`."""

    def __init__(
        self, path: Path, checkpoint: Checkpoint, scheme: WeightScheme, names: Iterable[str]
    ) -> None:
        config = checkpoint.config
        self._config = config
        self._arch = _architecture(config)
        self._writer = GGUFWriter(path, self._arch)
        self._names = list(names)
        self._next = 0
        metadata = {
            "general.file_type": _FILE_TYPES[gguf_type(scheme)],
            "general.quantization_version": 2,
            **_model_metadata(config, self._arch),
            **tokenizer_metadata(checkpoint.tokenizer(), config.vocab_size),
        }
        for key, value in metadata.items():
            _add_metadata(self._writer, key, value)
        divisors = _rope_divisors(config)
        if divisors is not None:
            self._writer.add_tensor_info(
                ROPE_FACTORS, divisors.shape, divisors.dtype, divisors.nbytes
            )
        for name in self._names:
            self._announce(name, checkpoint.shapes[name], scheme)
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_ti_data_to_file()
        if divisors is not None:
            self._writer.write_tensor_data(divisors)

    def add(self, name: str, value: Tensor | QuantizedWeight) -> None:
        assert name == self._names[self._next], f"{name} comes before {self._names[self._next]}"
        self._next += 1
        if (order := self._row_order(name)) is not None:
            value = value.rows(order) if isinstance(value, QuantizedWeight) else value[order]
        if isinstance(value, QuantizedWeight):
            self._writer.write_tensor_data(to_blocks(value))
        else:
            self._writer.write_tensor_data(value.float().contiguous().numpy())

    def finish(self) -> None:
        assert self._next == len(self._names), f"{self._next} of {len(self._names)} tensors came"
        self._writer.close()

    def _announce(self, name: str, shape: tuple[int, ...], scheme: WeightScheme) -> None:
        if len(shape) != 2:
            num_bytes = 4 * int(np.prod(shape))
            self._writer.add_tensor_info(gguf_name(name), shape, np.dtype(np.float32), num_bytes)
            return
        rows, inputs = shape
        if inputs % BLOCK:
            raise ConfigError(
                f"{name} has {inputs} inputs, which GGUF's blocks of {BLOCK} do not divide; "
                "use --format compressed-tensors"
            )
        is_outer = name in OUTER_NAMES.values()
        kind = TABLE_SCHEME.upper() if is_outer else gguf_type(scheme)
        row_bytes = inputs // BLOCK * BLOCK_BYTES[kind]
        self._writer.add_tensor_info(
            gguf_name(name),
            (rows, row_bytes),
            np.dtype(np.uint8),
            rows * row_bytes,
            raw_dtype=GGMLQuantizationType[kind],
        )

    def _row_order(self, name: str) -> Tensor | None:
        """Rows in the order of neighbouring pairs, which llama.cpp rotates, head by head."""
        heads = {".q_proj.": self._config.num_heads, ".k_proj.": self._config.num_kv_heads}
        for part, num_heads in heads.items():
            if self._arch == "llama" and part in name:
                rows = torch.arange(num_heads * self._config.head_dim)
                return rows.view(num_heads, 2, -1).transpose(1, 2).reshape(-1)
        return None


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor, from Hugging Face's."""
    outer = {hf: gguf for gguf, hf in OUTER_NAMES.items()}
    if name in outer:
        return outer[name]
    layers = {hf: gguf for gguf, hf in LAYER_NAMES.items()}
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, leaf = rest.rpartition(".")
    return f"blk.{number}.{layers[module]}.{leaf}"


def _architecture(config: ModelConfig) -> str:
    if config.architecture == "MistralForCausalLM":
        return "llama"
    if config.sliding_window is not None:
        raise ConfigError("GGUF cannot hold this model's sliding window; use compressed-tensors")
    return {hf: gguf for gguf, hf in ARCHITECTURES.items()}[config.architecture]


def _model_metadata(config: ModelConfig, arch: str) -> Mapping[str, Any]:
    metadata: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope.theta),
    }
    if config.sliding_window is not None:
        metadata["attention.sliding_window"] = config.sliding_window
    rope = config.rope
    if rope.kind in ("linear", "yarn"):
        metadata["rope.scaling.type"] = rope.kind
        metadata["rope.scaling.factor"] = float(rope.factor)
    if rope.kind == "yarn":
        metadata["rope.scaling.original_context_length"] = rope.original_max_position
        metadata["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        metadata["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
        if rope.attention_factor is not None:
            default = 0.1 * float(np.log(rope.factor)) + 1.0
            metadata["rope.scaling.attn_factor"] = rope.attention_factor / default
    return {f"{arch}.{key}": value for key, value in metadata.items()}


def _rope_divisors(config: ModelConfig) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """Llama 3's rope scaling as GGUF stores it: what each frequency is divided by."""
    if config.rope.kind != "llama3":
        return None
    frequencies, _ = rope_frequencies(config.rope, config.head_dim)
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    return (config.rope.theta ** (-pairs / config.head_dim) / frequencies).float().numpy()


def _add_metadata(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
