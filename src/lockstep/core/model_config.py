"""What a decoder-only transformer of the Llama family is, as plain data.

One description covers Llama 2/3, SmolLM2, Mistral, Qwen2/2.5 and Qwen3: they differ in biases, q/k norms,
sliding windows and rope scaling only. `from_hf` reads a Hugging Face `config.json`; `to_hf` writes one back.
Does not hold weights, dtypes or devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.core.errors import CheckpointError

Json = Mapping[str, Any]

RopeKind = Literal["default", "linear", "llama3", "yarn"]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, in Hugging Face's parametrisation (`rope_theta`, `rope_scaling`)."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    """Context length before scaling; llama3 and yarn need it."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Yarn's multiplier on cos and sin; None means 0.1 ln(factor) + 1."""
    truncate: bool = True
    """Yarn: round the correction range to whole dimensions."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and options of one model; every field is what `config.json` calls it, or says so."""

    architecture: str = "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head's q and k before rope (Qwen3)."""
    sliding_window: int | None = None
    """A query sees at most this many keys, itself included; None sees all."""
    window_layers: tuple[bool, ...] = ()
    """Which layers the window binds; empty means all of them."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    initializer_range: float = 0.02

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def window_of_layer(self, layer: int) -> int | None:
        """Sliding window of `layer` in tokens, or None for full attention."""
        if self.sliding_window is None or (self.window_layers and not self.window_layers[layer]):
            return None
        return self.sliding_window
