"""From a wire request to `SamplingParams`: the request's own values, then the model's, then ours.

The model's come from its `generation_config.json`, as vLLM does it, and only these fields; start
the server with `--generation-config none` to do without. The end-of-sequence ids in that file are
the engine's matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.core.sampling import SamplingParams
from lockstep.serve.errors import ApiError, invalid
from lockstep.serve.wire import ChatRequest, CompletionRequest, GenerationRequest

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for plain completions; a chat answer may by default fill the context."""

MAX_STOP_CHARS = 1024


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Sampling values a request gets when it names none."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> GenerationDefaults:
        """Take what is there and is a finite number; null and foreign types mean "not given"."""
        names = {
            "temperature": "temperature",
            "top_p": "top_p",
            "top_k": "top_k",
            "min_p": "min_p",
            "repetition_penalty": "repetition_penalty",
            "max_new_tokens": "max_tokens",
        }
        values = {
            ours: config[theirs] for theirs, ours in names.items() if _is_number(config.get(theirs))
        }
        return cls(**values)

    def described(self) -> str:
        """Only what differs from the neutral values, for the log."""
        neutral = GenerationDefaults()
        changed = [
            f"{name}={value}"
            for name, value in vars(self).items()
            if value != getattr(neutral, name)
        ]
        return ", ".join(changed) or "none"


def sampling_params(
    request: GenerationRequest,
    defaults: GenerationDefaults,
    *,
    prompt_tokens: int,
    max_model_len: int,
) -> SamplingParams:
    """Raises ApiError if prompt and answer do not fit, RequestError if a value is out of range."""
    stop = request.stop or []
    own: dict[str, Any] = {
        name: getattr(request, name)
        for name in (
            "n",
            "min_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
        )
        if getattr(request, name) is not None
    }
    inherited = {name: value for name, value in vars(defaults).items() if name != "max_tokens"}
    params = SamplingParams(
        **(inherited | own),
        max_tokens=_max_tokens(request, defaults, prompt_tokens, max_model_len),
        logit_bias=_logit_bias(request.logit_bias or {}),
        stop=tuple([stop] if isinstance(stop, str) else stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=_num_logprobs(request),
        prompt_logprobs=_num_prompt_logprobs(request),
    )
    if any(len(text) > MAX_STOP_CHARS for text in params.stop):
        raise invalid(f"a stop string has more than {MAX_STOP_CHARS} characters", param="stop")
    return params


def _max_tokens(
    request: GenerationRequest, defaults: GenerationDefaults, prompt_tokens: int, max_model_len: int
) -> int:
    param, asked = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        param, asked = "max_completion_tokens", request.max_completion_tokens
    room = max_model_len - prompt_tokens
    if room < 0 or (room == 0 and asked != 0):
        raise too_long(prompt_tokens, max_model_len)
    if asked is None:
        fallback = room if isinstance(request, ChatRequest) else COMPLETION_MAX_TOKENS
        return min(room, defaults.max_tokens or fallback)
    if asked > room:
        raise invalid(
            f"{param} is {asked}, but the context has {max_model_len} tokens and the prompt takes "
            f"{prompt_tokens}; ask for at most {room}",
            param=param,
            code="context_length_exceeded",
        )
    return asked


def too_long(prompt_tokens: int, max_model_len: int, *, at_least: bool = False) -> ApiError:
    count = f"at least {prompt_tokens}" if at_least else str(prompt_tokens)
    return invalid(
        f"the prompt has {count} tokens, but the context holds {max_model_len} "
        "including the answer; shorten the prompt",
        param="prompt",
        code="context_length_exceeded",
    )


def _num_logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
            raise invalid("top_logprobs needs logprobs: true", param="top_logprobs")
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs if isinstance(request, CompletionRequest) else None


def _num_prompt_logprobs(request: GenerationRequest) -> int | None:
    """Asked for directly, or because the echoed prompt must carry logprobs like the answer."""
    echoed = request.logprobs if isinstance(request, CompletionRequest) and request.echo else None
    asked = [count for count in (request.prompt_logprobs, echoed) if count is not None]
    return max(asked) if asked else None


def _logit_bias(wire: Mapping[str, float]) -> dict[int, float]:
    """JSON has string keys only."""
    try:
        return {int(token): bias for token, bias in wire.items()}
    except ValueError:
        raise invalid(
            "logit_bias maps token ids (as strings) to numbers", param="logit_bias"
        ) from None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
