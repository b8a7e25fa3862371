"""Rotary position embedding as plain data, in Hugging Face's parametrisation.

transformers 4 writes `rope_theta` and `rope_scaling` (with `type` or `rope_type`), transformers 5
one `rope_parameters`. Both are read; the older form is written, since both versions read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lockstep.core.errors import CheckpointError
from lockstep.core.json_fields import JsonFields

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, in Hugging Face's parametrisation (`rope_theta`,
    `rope_scaling`).
    """

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

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read the rope settings of a whole `config.json`; CheckpointError for kinds we do not
        have.
        """
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping) or any(
            isinstance(v, Mapping) for v in scaling.values()
        ):
            raise CheckpointError(
                "config.json: rope settings by layer type are not supported; layers must share one"
            )
        fields = JsonFields(scaling, where="config.json, rope scaling")
        whole = JsonFields(config)
        kind = fields.get("rope_type", fields.get("type", "default"))
        if kind not in get_args(RopeKind):
            raise CheckpointError(
                f"config.json: rope type {kind!r} is not supported; "
                f"supported are {', '.join(get_args(RopeKind))}"
            )
        partial = fields.real("partial_rotary_factor", whole.real("partial_rotary_factor", 1.0))
        if partial != 1.0:
            raise CheckpointError(
                f"config.json: partial_rotary_factor {partial:g} is not supported; it must be 1"
            )
        theta = fields.real("rope_theta", whole.real("rope_theta", 10_000.0))
        if kind == "default":
            return cls(theta=theta)
        if kind == "linear":
            return cls(theta=theta, kind="linear", factor=fields.real("factor"))
        original = whole.get("original_max_position_embeddings") or fields.get(
            "original_max_position_embeddings", whole.count("max_position_embeddings")
        )
        original = JsonFields({"original_max_position_embeddings": original}).count(
            "original_max_position_embeddings"
        )
        if kind == "llama3":
            low, high = fields.real("low_freq_factor"), fields.real("high_freq_factor")
            if low >= high:
                raise CheckpointError(
                    f"config.json: low_freq_factor {low:g} must be below high_freq_factor {high:g}"
                )
            return cls(
                theta=theta,
                kind="llama3",
                factor=fields.real("factor"),
                original_max_position=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )
        factor = fields.real("factor", whole.count("max_position_embeddings") / original)
        return cls(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=fields.real("beta_fast", 32.0),
            beta_slow=fields.real("beta_slow", 1.0),
            attention_factor=_attention_factor(fields, factor),
            truncate=fields.flag("truncate", True),
        )

    def to_hf(self) -> dict[str, Any]:
        """The keys `rope_theta` and `rope_scaling`."""
        if self.kind == "default":
            return {"rope_theta": self.theta, "rope_scaling": None}
        scaling: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind == "llama3":
            scaling |= {
                "low_freq_factor": self.low_freq_factor,
                "high_freq_factor": self.high_freq_factor,
                "original_max_position_embeddings": self.original_max_position,
            }
        elif self.kind == "yarn":
            scaling |= {
                "original_max_position_embeddings": self.original_max_position,
                "beta_fast": self.beta_fast,
                "beta_slow": self.beta_slow,
                "truncate": self.truncate,
            }
            if self.attention_factor is not None:
                scaling["attention_factor"] = self.attention_factor
        return {"rope_theta": self.theta, "rope_scaling": scaling}


def _attention_factor(fields: JsonFields, factor: float) -> float | None:
    """Yarn's attention factor; DeepSeek's `mscale` pair is another way to write it."""
    if fields.get("attention_factor") is not None:
        return fields.real("attention_factor")
    if not fields.get("mscale") or not fields.get("mscale_all_dim") or factor <= 1:
        return None
    over, under = (
        0.1 * fields.real(k) * math.log(factor) + 1 for k in ("mscale", "mscale_all_dim")
    )
    return over / under
