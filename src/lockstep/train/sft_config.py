"""The settings of a fine-tuning run, each with the help text of its flag."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lockstep.core.errors import ConfigError
from lockstep.models.lora import LoraConfig
from lockstep.train.dataset import DataConfig
from lockstep.train.optimizer import OptimizerConfig, ScheduleConfig


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
    "settings.loop.save_every",
    "settings.loop.keep",
    "settings.loop.eval_every",
)


def keys_that_may_differ(config: SFTConfig) -> tuple[str, ...]:
    """Paths of the settings under which a resumed run still gives the same weights."""
    if config.schedule.lr_schedule == "constant":  # the length does not shape the rate
        return (*_CANNOT_CHANGE_WEIGHTS, "settings.loop.epochs", "settings.loop.max_steps")
    return _CANNOT_CHANGE_WEIGHTS
