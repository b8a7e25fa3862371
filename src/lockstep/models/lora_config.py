"""Settings of low-rank adapters, apart from `lora` so that a command's help needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.core.errors import ConfigError

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Which projections get an adapter, and of what rank."""

    r: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ALL_LINEAR

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ConfigError(f"lora r must be at least 1, got {self.r}")
        unknown = sorted(set(self.targets) - set(ALL_LINEAR))
        if unknown or not self.targets:
            raise ConfigError(
                f"lora targets {unknown or 'are empty'}; choose from {', '.join(ALL_LINEAR)}"
            )
