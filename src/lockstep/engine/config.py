"""Settings of an engine, and the sizes that follow from them and from the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.core.errors import ConfigError
from lockstep.core.model_config import ModelConfig
from lockstep.core.quantization import KVCacheDtype
from lockstep.engine.step_inputs import StepLimits
from lockstep.kernels.attention import KVFormat
from lockstep.models.attention import KVCache, kv_format_for
from lockstep.models.llama import Llama
from lockstep.schedule import BLOCK_SIZE, SchedulerConfig

DEFAULT_KV_CACHE_BYTES = 1 << 30
"""Address space; the operating system gives a page memory when it is first written."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of an engine. Answers never depend on them, only speed and what is refused."""

    max_model_len: int | None = None
    """Longest prompt and answer together, in tokens; default: what the model was made for."""
    max_num_seqs: int = 256
    """Sequences computed together."""
    max_batch_tokens: int = 512
    """Tokens computed in one step, over all sequences. More gains little on a CPU, where 512 rows
    already fill the matrix kernels, and lets prompts hold up the others' next tokens for longer.
    """
    max_chunk_tokens: int | None = None
    """Prompt tokens of one sequence computed in one step; default: max_batch_tokens."""
    kv_cache_tokens: int | None = None
    """Size of the KV cache in tokens, all sequences together."""
    kv_cache_bytes: int | None = None
    """The same in bytes; default: 1 GiB, or what one sequence of max_model_len tokens needs."""
    enable_prefix_cache: bool = True
    """Share the KV blocks of prompts that begin with the same tokens."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """How keys and values are kept. auto: as the model has it, else as it computes. int8 and fp8
    (e4m3), with a scale for each token and head, take half of bf16's memory and change answers a
    little.
    """
    capture: Literal["auto", "off"] = "auto"
    """auto: record steps and replay each in one native call; off: call kernel by kernel, for
    comparison.
    """

    def __post_init__(self) -> None:
        for name in ("max_model_len", "kv_cache_tokens", "kv_cache_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.kv_cache_tokens is not None and self.kv_cache_bytes is not None:
            raise ConfigError("kv_cache_tokens and kv_cache_bytes exclude each other; give one")

    def kv_format(self, model: Llama) -> KVFormat:
        """Raises ConfigError where it is wider than what the model computes in."""
        chosen = model.kv_format if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        return kv_format_for(model.compute_dtype, chosen)

    def model_len(self, model: ModelConfig) -> int:
        """Longest sequence in tokens. Raises ConfigError if the model was not made for it."""
        if self.max_model_len is None:
            return model.max_position
        if self.max_model_len > model.max_position:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}, but the model was made for "
                f"{model.max_position} positions; use at most {model.max_position}"
            )
        return self.max_model_len

    def step_limits(self, model: ModelConfig) -> StepLimits:
        return StepLimits(
            max_tokens=self.max_batch_tokens,
            max_seqs=min(self.max_num_seqs, self.max_batch_tokens),
            max_blocks=-(-self.model_len(model) // BLOCK_SIZE),
        )

    def scheduler_config(self, model: Llama) -> SchedulerConfig:
        return SchedulerConfig(
            num_blocks=self._num_blocks(model),
            block_size=BLOCK_SIZE,
            max_num_seqs=self.max_num_seqs,
            max_batch_tokens=self.max_batch_tokens,
            max_chunk_tokens=self.max_chunk_tokens or self.max_batch_tokens,
            enable_prefix_cache=self.enable_prefix_cache,
        )

    def _num_blocks(self, model: Llama) -> int:
        if self.kv_cache_tokens is not None:
            return -(-self.kv_cache_tokens // BLOCK_SIZE)
        block_bytes = KVCache.bytes_per_block(
            model.config, model.compute_dtype, format=self.kv_format(model)
        )
        if self.kv_cache_bytes is None:
            one_sequence = -(-self.model_len(model.config) // BLOCK_SIZE)
            return max(DEFAULT_KV_CACHE_BYTES // block_bytes, one_sequence)
        if self.kv_cache_bytes < block_bytes:
            raise ConfigError(
                f"kv_cache_bytes is {self.kv_cache_bytes}, but one block of {BLOCK_SIZE} tokens "
                f"takes {block_bytes}; give at least that"
            )
        return self.kv_cache_bytes // block_bytes
