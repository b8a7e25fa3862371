"""The JSON a client may send, as pydantic models under OpenAI's and vLLM's names.

Types are strict ("7" is not 7) and NaN and infinity are refused here; ranges are checked where the
values are used (`SamplingParams`, `prompts`). `null` means "not given" everywhere. Fields that are
not declared land in `model_extra` and are judged by `fields.check_extra_fields`.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class WireModel(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(WireModel):
    include_usage: bool | None = None
    """Send a last chunk with `choices: []` and the usage."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far with every chunk."""


class GenerationRequest(WireModel):
    """What chat and plain completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    """Lower runs first, as in vLLM; 0 if not given."""


class ChatFields(WireModel):
    """How a conversation becomes a prompt; shared by chat completions and `/tokenize`."""

    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None


class ChatRequest(GenerationRequest, ChatFields):
    max_completion_tokens: int | None = None
    """OpenAI's newer name for `max_tokens`; wins if both are given."""
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionRequest(GenerationRequest):
    prompt: str | list[Any]
    """A string, strings, token ids or lists of token ids; `prompts.split_prompts` tells which."""
    echo: bool | None = None
    logprobs: int | None = None


class TokenizeRequest(ChatFields):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(WireModel):
    model: str | None = None
    tokens: list[int]
