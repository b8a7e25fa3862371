"""The settings of training, each with the help text of its flag. No torch, so help is instant."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lockstep.core.errors import ConfigError
from lockstep.models.lora_config import LoraConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which records, and how long a document may be."""

    data: Path
    """JSONL or Parquet file of training records."""
    eval_data: Path | None = None
    """JSONL or Parquet file of held-out records."""
    max_length: int = 2048
    """Longest document, in tokens."""
    overlong: Literal["truncate", "drop", "refuse"] = "truncate"
    """A longer document is cut off at the end, left out, or stops the run."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ConfigError(f"max_length must be at least 2, got {self.max_length}")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and gradient clipping."""

    learning_rate: float = 1e-4
    """Peak learning rate; for full fine-tuning a tenth of the default is usual."""
    beta1: float = 0.9
    """Decay of the gradient's running mean."""
    beta2: float = 0.999
    """Decay of the squared gradient's running mean."""
    eps: float = 1e-8
    """Added to the root of the running mean of squares."""
    weight_decay: float = 0.0
    """Decoupled weight decay, applied to matrices only: not to norms, biases or embeddings."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global L2 norm; None leaves them alone."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name):g}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be from 0 to below 1, got {getattr(self, name):g}")
        if self.weight_decay < 0:
            raise ConfigError(f"weight_decay must be at least 0, got {self.weight_decay:g}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be above 0, got {self.max_grad_norm:g}")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate moves over a run."""

    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after warm-up."""
    warmup_steps: int = 0
    """Steps over which the rate rises linearly; the first has 1/warmup_steps of the peak."""
    min_lr_ratio: float = 0.0
    """Where cosine and linear end, as a fraction of the peak."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps must be at least 0, got {self.warmup_steps}")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"min_lr_ratio must be from 0 to 1, got {self.min_lr_ratio:g}")


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How long to train, on how much at a time, and when to measure and save."""

    epochs: int = 1
    """Passes over the data."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, whatever `epochs` says."""
    global_batch_size: int = 16
    """Documents in one optimizer step."""
    micro_batch_tokens: int = 4096
    """Tokens in one forward and backward pass; it sets the memory, not what is learned."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    recompute_mlp: bool = False
    """Recompute half of them only, the wide ones of the MLP: about a tenth more time."""
    save_every: int = 100
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints to keep."""
    eval_every: int = 50
    """Steps between measurements of the loss on the held-out data."""
    seed: int = 0
    """Seed of the data order and of the adapter's initial weights."""

    def __post_init__(self) -> None:
        for name in ("epochs", "global_batch_size", "micro_batch_tokens", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_steps", "eval_every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Everything that determines a run."""

    model: str
    """What `load_model` takes: a name such as smollm2, a Hugging Face folder or a GGUF file."""
    out: Path
    data: DataConfig
    loop: LoopConfig = field(default_factory=LoopConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    """None trains every weight."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Precision of the computation; trained weights are stored in fp32 either way."""
    quantization: str | None = None
    """How frozen weights are held, or trained ones are rounded before each product: int8, int4 and
    so on, or native."""

    def __post_init__(self) -> None:
        if self.data.max_length > self.loop.micro_batch_tokens:
            raise ConfigError(
                f"max_length={self.data.max_length} exceeds "
                f"micro_batch_tokens={self.loop.micro_batch_tokens}; a document must fit into a "
                "micro-batch: lower the first or raise the second"
            )


_CANNOT_CHANGE_WEIGHTS = (
    "settings.out",
    "settings.data.data",  # its content is compared by hash
    "settings.data.eval_data",
    "settings.loop.activation_checkpointing",
    "settings.loop.recompute_mlp",
    "settings.loop.save_every",
    "settings.loop.keep",
    "settings.loop.eval_every",
)


def keys_that_may_differ(config: SFTConfig) -> tuple[str, ...]:
    """Paths of the settings under which a resumed run still gives the same weights."""
    if config.schedule.lr_schedule == "constant":  # the length does not shape the rate
        return (*_CANNOT_CHANGE_WEIGHTS, "settings.loop.epochs", "settings.loop.max_steps")
    return _CANNOT_CHANGE_WEIGHTS
