"""Sampling parameters of one request, validated, under vLLM's and OpenAI's names.

The order in which they act on a row of logits is fixed (see `lockstep.engine.sampler`): logit bias,
repetition, presence and frequency penalties, temperature, top-k, top-p, min-p, then the draw.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.core.errors import RequestError

MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 16


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a request ends; RequestError names an invalid field."""

    max_tokens: int = 16
    min_tokens: int = 0
    """End-of-sequence and stop tokens cannot be drawn before this many tokens."""
    n: int = 1
    """Independent samples of the same prompt; sample i uses the noise stream of (seed, i)."""
    temperature: float = 1.0
    """0 means greedy: the largest logit, the lowest token id among equals."""
    top_k: int = 0
    """Keep the k largest logits; 0 (or -1) keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """None draws a fresh seed, reported with the completion so that the answer can be had again."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """Most likely alternatives to report for each generated token; 0 reports the token's own."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, low=0)
        _integer("min_tokens", self.min_tokens, low=0, high=self.max_tokens)
        _integer("n", self.n, low=1, high=128)
        _real("temperature", self.temperature, low=0.0, high=100.0)
        _integer("top_k", self.top_k, low=-1)
        _real("top_p", self.top_p, low=0.0, high=1.0, exclude_low=True)
        _real("min_p", self.min_p, low=0.0, high=1.0)
        _real("repetition_penalty", self.repetition_penalty, low=0.0, high=100.0, exclude_low=True)
        _real("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _real("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        if self.seed is not None:
            _integer("seed", self.seed, low=-(2**63), high=2**64 - 1)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _integer(name, count, low=0, high=MAX_LOGPROBS)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, low=0)
            _real("logit_bias", bias, low=-100.0, high=100.0)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"got {len(self.stop)} stop strings; at most {MAX_STOP_STRINGS} are allowed",
                param="stop",
            )
        if any(not text for text in self.stop):
            raise RequestError("a stop string is empty; give at least one character", param="stop")

    @property
    def inverse_temperature(self) -> float:
        """What logits are multiplied by, to the bit: 1 / temperature in fp32, as the kernels take
        it. A trainer that wants the sampling logprobs back must use this one.
        """
        return _fp32(1.0 / _fp32(self.temperature))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _fp32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _integer(name: str, value: object, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be {bound}, got {value}", param=name)


def _real(name: str, value: object, *, low: float, high: float, exclude_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {value!r}", param=name)
    if value < low or value > high or (exclude_low and value == low):
        bound = (
            f"above {low:g} and at most {high:g}" if exclude_low else f"from {low:g} to {high:g}"
        )
        raise RequestError(f"{name} must be {bound}, got {value:g}", param=name)
