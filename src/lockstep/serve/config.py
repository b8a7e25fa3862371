"""Settings of a server. Imports nothing heavy, so that the port is taken before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.core.errors import ConfigError
from lockstep.core.quantization import KVCacheDtype, check_weights


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """Where the server listens and what it takes."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    max_body_mib: int = 16
    """Largest request body, in MiB."""
    drain_seconds: float = 30.0
    """How long requests under way may go on after SIGTERM or SIGINT."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be from 0 to 65535, got {self.port}")
        if self.max_body_mib < 1:
            raise ConfigError(f"--max-body-mib must be at least 1, got {self.max_body_mib}")
        if not 0 <= self.drain_seconds <= 86_400:
            raise ConfigError(
                f"--drain-seconds must be from 0 to 86400, got {self.drain_seconds:g}"
            )

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mib << 20


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What runs behind the routes."""

    precision: Literal["bf16", "fp32"] = "bf16"
    """What is computed in; also weights and KV cache, unless told otherwise."""
    quantization: str | None = None
    """How weights are held: int8, int4, fp8 and so on rounds them while loading, native keeps
    those of a GGUF file, float undoes them; default: float, or as a compressed-tensors folder has
    them."""
    max_model_len: int | None = None
    """Longest prompt and answer together, in tokens; default: what the model was made for."""
    max_num_seqs: int = 256
    """Sequences computed together."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """How keys and values are kept; int8 and fp8 hold twice the tokens of bf16 in the same memory;
    auto: as the model computes."""
    kv_cache_tokens: int | None = None
    """Size of the KV cache in tokens; default: 1 GiB, or one request of max_model_len."""
    threads: int | None = None
    """Threads of the kernels; default: all cores."""
    generation_config: Literal["model", "none"] = "model"
    """Whether sampling defaults come from the model's generation_config.json."""
    adapter: str | None = None
    """Folder of a PEFT LoRA adapter to serve on top of the model."""

    def __post_init__(self) -> None:
        if self.quantization is not None:
            check_weights(self.quantization)
        for name in ("max_model_len", "max_num_seqs", "kv_cache_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} must be at least 1, got {value}")
