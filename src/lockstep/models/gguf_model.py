"""A GGUF file seen as a Hugging Face checkpoint: its config, its tokenizer, its weights by HF name.

Three things differ between the two worlds and are undone here: tensor names; for architecture
`llama`, the order of the rows of the q and k projections (llama.cpp rotates neighbouring pairs,
Hugging Face the two halves of a head); and Llama 3's rope scaling, which GGUF stores as one divisor
for each frequency.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.core.errors import CheckpointError
from lockstep.core.json_fields import JsonFields
from lockstep.core.model_config import ModelConfig
from lockstep.core.quantization import GGUF_NAMES
from lockstep.core.rope_config import RopeConfig
from lockstep.kernels.linear import QuantizedWeight
from lockstep.kernels.linear.gguf_blocks import from_blocks
from lockstep.models.gguf_file import GgufFile
from lockstep.text.gguf_tokenizer import tokenizer_files
from lockstep.text.tokenizer import Tokenizer

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""`general.architecture` to Hugging Face's name. Mistral's older files call themselves llama."""

ROPE_FACTORS = "rope_freqs.weight"

OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufModel:
    """A checkpoint (see `lockstep.models.loading.Checkpoint`) in one GGUF file."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self._gguf_names = {_hf_name(name): name for name in self._file.tensors}
        self._gguf_names.pop(ROPE_FACTORS, None)
        self.config = _config(self._file)
        self.generation_config: Mapping[str, Any] = {}
        self._is_permuted = self._file.metadata["general.architecture"] == "llama"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by Hugging Face's name."""
        tensors = self._file.tensors
        return {hf: tensors[name].shape for hf, name in self._gguf_names.items()}

    def read(self, name: str) -> torch.Tensor:
        """The tensor of this HF name, dequantised to float32, in Hugging Face's row order."""
        values = self._file.read(self._gguf_names[name])
        if self._is_permuted and ".q_proj." in name:
            values = _halves_from_pairs(values, self.config.num_heads)
        elif self._is_permuted and ".k_proj." in name:
            values = _halves_from_pairs(values, self.config.num_kv_heads)
        return torch.from_numpy(values)

    @property
    def is_quantized(self) -> bool:
        return any(self._scheme_of(name) is not None for name in self._gguf_names)

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        """A weight in the blocks it is stored in, None where those are floats or of a type that
        no kernel reads.
        """
        scheme = self._scheme_of(name)
        if scheme is None:
            return None
        raw = torch.from_numpy(self._file.raw_rows(self._gguf_names[name]))
        weight = from_blocks(raw, scheme)
        heads = {".q_proj.": self.config.num_heads, ".k_proj.": self.config.num_kv_heads}
        for part, num_heads in heads.items():
            if self._is_permuted and part in name:
                order = _halves_from_pairs(np.arange(weight.shape[0]), num_heads)
                weight = weight.rows(torch.from_numpy(order))
        return weight

    def _scheme_of(self, name: str) -> str | None:
        info = self._file.tensors[self._gguf_names[name]]
        scheme = info.type.name.lower()
        return scheme if len(info.shape) == 2 and scheme in GGUF_NAMES else None

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(tokenizer_files(self._file.metadata))


def _hf_name(name: str) -> str:
    """Names we do not know stay as they are, and are reported as unexpected on loading."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


def _halves_from_pairs(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows (2i, 2i+1) of each head become rows (i, i + H/2); works for weights and biases."""
    if len(rows) % (2 * num_heads):
        raise CheckpointError(f"{len(rows)} rows of a q or k projection for {num_heads} heads")
    by_pair = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(rows.shape)


def _config(file: GgufFile) -> ModelConfig:
    metadata, tensors = file.metadata, file.tensors
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: general.architecture is {kind!r}; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    fields = JsonFields(
        {k.removeprefix(f"{kind}."): v for k, v in metadata.items()}, where=str(file.path)
    )
    if fields.get("expert_count", 0):
        raise CheckpointError(f"{file.path}: mixture-of-experts models are not supported")
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{file.path} has no tensor token_embd.weight")
    num_heads = fields.count("attention.head_count")
    hidden_size = fields.count("embedding_length")
    head_dim = fields.count("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.count(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{file.path}: {key} {fields.get(key)} is not supported; "
                f"it must equal the head dimension {head_dim}"
            )
    window = fields.get("attention.sliding_window")
    architecture = ARCHITECTURES[kind]
    if window is not None and kind == "llama":
        architecture = "MistralForCausalLM"
    elif window is not None:
        raise CheckpointError(f"{file.path}: a sliding window in a {kind} file is not supported")
    qkv_bias, o_bias = (f"blk.0.{part}.bias" in tensors for part in ("attn_q", "attn_output"))
    if kind != "qwen2" and qkv_bias != o_bias:
        raise CheckpointError(f"{file.path}: {kind} with biases on only some of q, k, v and o")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.count("feed_forward_length"),
        num_layers=fields.count("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position=fields.count("context_length"),
        rms_norm_eps=_shortest(fields.real("attention.layer_norm_rms_epsilon", 1e-6)),
        rope=_rope(file, fields, head_dim),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=kind == "qwen3",
        sliding_window=None if window is None else fields.count("attention.sliding_window"),
        bos_token_id=next(iter(fields.token_ids("tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=_end_tokens(fields),
    )
    config.check(where=str(file.path))
    return config


def _end_tokens(fields: JsonFields) -> tuple[int, ...]:
    """End of sequence, and end of turn where the file has one of its own."""
    ids = (fields.token_ids(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return tuple(dict.fromkeys(i for group in ids for i in group))


def _shortest(value: float) -> float:
    """The decimal that was meant: GGUF stores 1e-5 as the float32 9.99999975e-06."""
    return float(str(np.float32(value)))


def _rope(file: GgufFile, fields: JsonFields, head_dim: int) -> RopeConfig:
    theta = _shortest(fields.real("rope.freq_base", 10_000.0))
    kind = fields.get("rope.scaling.type", "none")
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear", 1.0))
    if ROPE_FACTORS in file.tensors:
        return _llama3_rope(file, theta, head_dim)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        attention = fields.get(
            "rope.scaling.attn_factor", fields.get("rope.scaling.yarn_attn_factor")
        )
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=fields.real("rope.scaling.factor"),
            original_max_position=fields.count("rope.scaling.original_context_length"),
            beta_fast=_shortest(fields.real("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=_shortest(fields.real("rope.scaling.yarn_beta_slow", 1.0)),
            attention_factor=None
            if attention in (None, 1.0)
            else _times_default(attention, factor),
        )
    raise CheckpointError(
        f"{file.path}: rope.scaling.type {kind!r} is not supported; use none, linear or yarn"
    )


def _times_default(attention: float, factor: float) -> float:
    """llama.cpp multiplies its attn_factor onto yarn's own magnitude; Hugging Face replaces it."""
    return attention * (0.1 * float(np.log(factor)) + 1.0)


def _llama3_rope(file: GgufFile, theta: float, head_dim: int) -> RopeConfig:
    """Find the llama3 parameters whose divisors are those in the file.

    Llama 3.1 divides a frequency of wavelength w by 1 where w is short, by `factor` where it is
    long, and by 1 / ((1 - s) / factor + s) between, with s = (original / w - low) / (high - low).
    So s is linear in 1 / w, and two divisors between the extremes give the line. `low` is 1 in
    every model there is; with fewer than two, Llama 3.1's own 8192, 1 and 4 are tried.
    """
    divisors = file.read(ROPE_FACTORS).astype(np.float64)
    if divisors.shape != (head_dim // 2,) or not np.isfinite(divisors).all() or divisors.min() < 1:
        raise CheckpointError(
            f"{file.path}: {ROPE_FACTORS} must hold {head_dim // 2} divisors of 1 or more"
        )
    factor = float(divisors.max())
    if factor == 1.0:
        return RopeConfig(theta=theta)
    inverse_wavelength = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = (smooth > 1e-4) & (smooth < 1 - 1e-4)
    original, high = 8192, 4.0
    if between.sum() >= 2:
        slope, offset = np.polyfit(inverse_wavelength[between], smooth[between], 1)
        high = round(float(1 - 1 / offset), 3)  # offset = -low / (high - low), low = 1
        original = round(float(slope) * (high - 1))
    rope = RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        original_max_position=original,
        low_freq_factor=1.0,
        high_freq_factor=high,
    )
    fitted = ((original * inverse_wavelength - 1.0) / (high - 1.0)).clip(0, 1)
    if not np.allclose((1 - fitted) / factor + fitted, 1 / divisors, rtol=1e-4):
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS} is not Llama 3's rope scaling")
    return rope
