"""What a decoder-only transformer of the Llama family is, as plain data.

One description covers Llama 2/3, SmolLM2, Mistral, Qwen2/2.5 and Qwen3: they differ in biases, q/k
norms, sliding windows and rope scaling only. `from_hf` reads a Hugging Face `config.json`; `to_hf`
writes one back. Does not hold weights, dtypes or devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.core.errors import CheckpointError
from lockstep.core.json_fields import JsonFields
from lockstep.core.rope_config import RopeConfig, RopeKind

__all__ = ["ARCHITECTURES", "Json", "ModelConfig", "RopeConfig", "RopeKind"]

Json = Mapping[str, Any]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Supported architectures and their `model_type`."""

MAX_LAYERS = 10_000
"""A damaged config must not make us build billions of layers."""

# What transformers assumes where a config.json is silent.
_MAX_POSITION = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
_NUM_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}


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

    @property
    def model_type(self) -> str:
        return ARCHITECTURES[self.architecture]

    def window_of_layer(self, layer: int) -> int | None:
        """Sliding window of `layer` in tokens, or None for full attention."""
        if self.sliding_window is None or (self.window_layers and not self.window_layers[layer]):
            return None
        return self.sliding_window

    @classmethod
    def from_hf(cls, config: Json) -> ModelConfig:
        """Read a `config.json` as transformers 4 or 5 writes it.

        Raises CheckpointError for what is missing, malformed, or not a model of this family.
        """
        architecture = _architecture(config)
        kind = ARCHITECTURES[architecture]
        fields = JsonFields(config)
        activation = fields.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise CheckpointError(
                f"config.json: hidden_act {activation!r} is not supported; it must be 'silu'"
            )
        if (quantization := fields.get("quantization_config")) is not None:
            given = quantization if isinstance(quantization, Mapping) else {}
            raise CheckpointError(
                f"config.json: weights quantised with {given.get('quant_method')!r} are not "
                "supported; use the checkpoint in float or bfloat16, or a GGUF file"
            )
        hidden_size = fields.count("hidden_size")
        num_heads = fields.count("num_attention_heads")
        # A head_dim of its own needs no divisibility: q_size is num_heads * head_dim then.
        derived = 128 if kind == "qwen3" else _quotient(hidden_size, num_heads)
        num_layers = fields.count("num_hidden_layers", high=MAX_LAYERS)
        window, window_layers = _sliding_window(fields, kind, num_layers)
        attention_bias = kind in ("llama", "qwen3") and fields.flag("attention_bias", False)
        loaded = cls(
            architecture=architecture,
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(fields, kind, num_heads),
            head_dim=fields.count("head_dim", derived),
            max_position=fields.count("max_position_embeddings", _MAX_POSITION[kind]),
            rms_norm_eps=fields.real("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_hf({"max_position_embeddings": _MAX_POSITION[kind], **config}),
            tie_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=kind == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=kind == "llama" and fields.flag("mlp_bias", False),
            qk_norm=kind == "qwen3",
            sliding_window=window,
            window_layers=window_layers,
            bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
            eos_token_ids=fields.token_ids("eos_token_id"),
            initializer_range=fields.real("initializer_range", 0.02),
        )
        loaded.check()
        return loaded

    def to_hf(self, *, dtype: str = "float32") -> dict[str, Any]:
        """A `config.json` that transformers 4 and 5 and vLLM read; `dtype` is that of the
        weights.
        """
        kind = self.model_type
        eos = list(self.eos_token_ids)
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": kind,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position,
            "initializer_range": self.initializer_range,
            "rms_norm_eps": self.rms_norm_eps,
            **self.rope.to_hf(),
            "tie_word_embeddings": self.tie_embeddings,
            "attention_dropout": 0.0,
            "use_cache": True,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
            "torch_dtype": dtype,
        }
        if kind in ("llama", "qwen3"):
            config["attention_bias"] = self.o_bias
        if kind == "llama":
            config["mlp_bias"] = self.mlp_bias
        if kind == "mistral":
            config["sliding_window"] = self.sliding_window
        if kind in ("qwen2", "qwen3"):
            bound = [self.window_of_layer(i) is not None for i in range(self.num_layers)]
            config |= {
                "use_sliding_window": any(bound),
                "sliding_window": self.sliding_window,
                "max_window_layers": bound.index(True) if any(bound) else self.num_layers,
                "layer_types": [
                    "sliding_attention" if is_bound else "full_attention" for is_bound in bound
                ],
            }
        return config

    def check(self, *, where: str = "config.json") -> None:
        """Raise CheckpointError, naming `where` it was read, if the numbers cannot go together."""
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{where}: {self.num_kv_heads} key/value heads do not divide "
                f"{self.num_heads} attention heads"
            )
        if self.head_dim % 2:
            raise CheckpointError(
                f"{where}: head dimension {self.head_dim} is odd; rope needs pairs"
            )


def _architecture(config: Json) -> str:
    named = config.get("architectures")
    if isinstance(named, list) and named:
        name = named[0]
    else:
        kinds = {kind: name for name, kind in ARCHITECTURES.items()}
        name = kinds.get(str(config.get("model_type")), config.get("model_type"))
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"config.json: architecture {name!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    return name


def _quotient(hidden_size: int, num_heads: int) -> int | None:
    return hidden_size // num_heads if hidden_size % num_heads == 0 else None


def _num_kv_heads(fields: JsonFields, kind: str, num_heads: int) -> int:
    # transformers: an explicit null means "as many as heads", silence the class's default.
    is_null = "num_key_value_heads" in fields.values
    return fields.count(
        "num_key_value_heads", num_heads if is_null else _NUM_KV_HEADS.get(kind, num_heads)
    )


def _sliding_window(
    fields: JsonFields, kind: str, num_layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    """The window, and the layers it binds (empty: all)."""
    if kind == "mistral":
        is_silent = "sliding_window" not in fields.values
        window = fields.get("sliding_window", 4096 if is_silent else None)
        return (None if window is None else fields.count("sliding_window", 4096)), ()
    if kind == "llama" or not fields.flag("use_sliding_window", False):
        return None, ()
    types = fields.items("layer_types")
    if types is None:
        first = fields.count("max_window_layers", 28, low=0)
        bound = tuple(layer >= first for layer in range(num_layers))
    else:
        if len(types) != num_layers:
            raise CheckpointError(
                f"config.json: layer_types has {len(types)} entries for {num_layers} layers"
            )
        bound = tuple(name == "sliding_attention" for name in types)
    if not any(bound) or fields.get("sliding_window", 0) is None:
        return None, ()
    return fields.count("sliding_window", 4096), () if all(bound) else bound
