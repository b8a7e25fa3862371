"""The least time this machine could take, from what each task must compute and read.

FLOPs: 2 for every weight a token meets in a forward pass, 4 with gradients of inputs, 6 with those
of weights, and causal attention. Bytes: in decoding every step reads all weights and the streams'
keys and values (bf16, fp32 in fp32) once. A limit is the larger of both times, at the rates that
machine_worker.py measures: reading that many bytes, products of 512 rows. Low-bit weights are
multiplied as 8-bit integers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workload import LORA_RANK, SFT_DOCUMENT_TOKENS, Case

WEIGHT_BITS = {"fp32": 32.0, "bf16": 16.0, "int8": 8.0, "int4": 4.5}
"""int4 with a 16-bit scale for each 32 weights."""
CACHE_BYTES = {"fp32": 4}
"""Of a key or value; 2 in every other precision."""
PRODUCTS = {"fp32": "fp32", "bf16": "bf16"}
"""Kind of product by precision; int8 for every other."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the machine reaches in this run."""

    flops_per_s: Mapping[str, float]
    bytes_per_s: Callable[[int], float]
    """For a working set of so many bytes."""

    def products(self, precision: str) -> float:
        return self.flops_per_s[PRODUCTS.get(precision, "int8")]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a Llama or Qwen2 model, from its config.json."""

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
    def weights(self) -> int:
        """Met by every token that is decoded."""
        return self.body_weights + self.head_weights

    @property
    def adapter_weights(self) -> int:
        return self.layers * LORA_RANK * sum(k + n for k, n in self.linears_kn.values())

    def weight_bytes(self, precision: str) -> int | None:
        """None for the shipped file, which mixes formats."""
        bits = WEIGHT_BITS.get(precision)
        return None if bits is None else round(self.weights * bits / 8)

    def cache_bytes(self, precision: str, context: float) -> float:
        return 2 * self.layers * self.kv_size * CACHE_BYTES.get(precision, 2) * context

    def attention_flops(self, context: float) -> float:
        """Forward, for one query that sees `context` keys."""
        return 4 * self.layers * self.q_size * context


def step_bytes(case: Case, shape: ModelShape) -> int | None:
    """What a decode step, or the rows of a short prompt, must read."""
    weights = shape.weight_bytes(case.precision)
    if weights is None or case.kind not in ("decode", "ttft"):
        return None
    if case.kind == "ttft":
        return round(weights + shape.cache_bytes(case.precision, case.cached_tokens))
    context = case.prompt_tokens + case.generated_tokens / 2
    return round(weights + case.batch * shape.cache_bytes(case.precision, context))


def limit_of(case: Case, shape: ModelShape, machine: Machine) -> float | None:
    """In the case's unit; None for memory, start-up and the shipped file."""
    if case.unit in ("MB", "s") or shape.weight_bytes(case.precision) is None:
        return None
    flops_per_s = machine.products(case.precision)
    if case.kind == "decode":
        context = case.prompt_tokens + case.generated_tokens / 2
        flops = 2 * shape.weights + shape.attention_flops(context)
        return case.batch / max(_read_s(case, shape, machine), case.batch * flops / flops_per_s)
    if case.kind in ("prefill", "ttft"):
        new_tokens = case.prompt_tokens - case.cached_tokens
        flops = 2 * (new_tokens * shape.body_weights + shape.head_weights)
        mean_context = (case.prompt_tokens + case.cached_tokens) / 2
        flops += new_tokens * shape.attention_flops(mean_context)
        seconds = flops / flops_per_s
        if case.kind == "prefill":
            return case.prompt_tokens / seconds
        return max(seconds, _read_s(case, shape, machine)) * 1000
    attention = 3 * shape.attention_flops(SFT_DOCUMENT_TOKENS / 2)
    if case.kind == "lora":
        return flops_per_s / (4 * shape.weights + 6 * shape.adapter_weights + attention)
    return flops_per_s / (6 * shape.weights + attention)


def _read_s(case: Case, shape: ModelShape, machine: Machine) -> float:
    num_bytes = step_bytes(case, shape)
    assert num_bytes is not None
    return num_bytes / machine.bytes_per_s(num_bytes)


def machine_of(measured: Mapping[str, Any]) -> Machine:
    """From what machine_worker.py answered, whose sizes are keys of JSON, thus strings."""
    rates = {int(size): rate for size, rate in measured["bytes_per_s"].items()}
    return Machine(flops_per_s=measured["flops_per_s"], bytes_per_s=rates.__getitem__)
