"""The least time this machine could take, from what each task must compute and read.

FLOPs: 2 for every weight a token meets in a forward pass, 4 with gradients of inputs, 6 with those
of weights, and causal attention. Bytes: in decoding every step reads all weights and the streams'
keys and values once. A limit is the larger of both times.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workload import (
    LORA_RANK,
    PREFILL_TOKENS,
    PROMPT_TOKENS,
    SFT_DOCUMENT_TOKENS,
    Case,
)

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a Llama model, from its config.json."""

    hidden: int
    intermediate: int
    layers: int
    q_size: int
    kv_size: int
    vocabulary: int

    @classmethod
    def from_folder(cls, folder: Path) -> ModelShape:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        return cls(
            hidden=hidden,
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            q_size=heads * head_dim,
            kv_size=config["num_key_value_heads"] * head_dim,
            vocabulary=config["vocab_size"],
        )

    @property
    def linears_kn(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of every projection of a layer."""
        d, f = self.hidden, self.intermediate
        return {
            "q_proj": (d, self.q_size),
            "k_proj": (d, self.kv_size),
            "v_proj": (d, self.kv_size),
            "o_proj": (self.q_size, d),
            "gate_proj": (d, f),
            "up_proj": (d, f),
            "down_proj": (f, d),
        }

    @property
    def body_weights(self) -> int:
        return self.layers * sum(k * n for k, n in self.linears_kn.values())

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def adapter_weights(self) -> int:
        return self.layers * LORA_RANK * sum(k + n for k, n in self.linears_kn.values())

    def weight_bytes(self, precision: str) -> int:
        return (self.body_weights + self.head_weights) * ELEMENT_BYTES[precision]

    def attention_flops(self, context: float) -> float:
        """Forward, for one query that sees `context` keys."""
        return 4 * self.layers * self.q_size * context


def limit_tokens_per_s(
    case: Case, shape: ModelShape, machine: Mapping[str, Mapping[str, float]]
) -> float | None:
    """None for quantised weights, whose arithmetic nobody here measures."""
    if case.precision not in ELEMENT_BYTES:
        return None
    flops_per_s = machine["flops_per_s"][case.precision]
    weights = shape.body_weights + shape.head_weights
    if case.kind == "decode":
        context = PROMPT_TOKENS + case.generated_tokens / 2
        flops = 2 * weights + shape.attention_flops(context)
        cache_bytes = 2 * shape.layers * shape.kv_size * ELEMENT_BYTES[case.precision] * context
        step_bytes = shape.weight_bytes(case.precision) + case.batch * cache_bytes
        read_s = step_bytes / machine["bytes_per_s"][case.precision]
        return case.batch / max(read_s, case.batch * flops / flops_per_s)
    if case.kind == "prefill":
        flops = 2 * shape.body_weights + 2 * shape.head_weights / PREFILL_TOKENS
        return flops_per_s / (flops + shape.attention_flops(PREFILL_TOKENS / 2))
    attention = 3 * shape.attention_flops(SFT_DOCUMENT_TOKENS / 2)
    if case.kind == "lora":
        return flops_per_s / (4 * weights + 6 * shape.adapter_weights + attention)
    return flops_per_s / (6 * weights + attention)
