"""What becomes of request fields that the wire models do not declare.

A field that would change the answer and is not implemented is refused, never quietly dropped. A
field that cannot change the answer is ignored. Anything else is accepted with one logged warning
per name. The tables below are the reference; docs/serve.md prints them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lockstep.serve.errors import invalid
from lockstep.serve.wire import ChatFields, ChatRequest, CompletionRequest, WireModel

logger = logging.getLogger("lockstep.serve")

_STRUCTURED = "structured output is not supported yet; leave it out and check the text yourself"

REFUSED: dict[str, str] = {
    "response_format": _STRUCTURED,
    "structured_outputs": _STRUCTURED,
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "functions": "tool calls are not parsed yet; see `tools`",
    "function_call": "tool calls are not parsed yet; see `tools`",
    "suffix": "no served model is trained to fill in the middle; put everything into `prompt`",
    "best_of": "only best_of equal to n is served; send `n` and choose by logprob yourself",
    "use_beam_search": "beam search is not supported; sample with `n` instead",
    "length_penalty": "it belongs to beam search, which is not supported",
    "cache_salt": "prefix caches cannot be salted yet; without it all callers share the cache",
    "chat_template": "a template from the request is not run; the model brings its own",
    "documents": "documents are not passed to templates; put their text into a message",
    "truncate_prompt_tokens": "prompts are not truncated; send fewer tokens",
    "allowed_token_ids": "use `logit_bias` instead",
    "bad_words": "use `logit_bias` or `stop` instead",
    "logits_processors": "use `logit_bias` instead",
    "prompt_embeds": "prompts are text or token ids",
    "mm_processor_kwargs": "this server takes text only",
    "audio": "this server writes text only",
    "modalities": 'only ["text"] is served',
    "web_search_options": "this server does not search the web",
}
"""Field name: why it is refused, and what to do instead."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "function_call": ("none", "auto"),
    "best_of": (1,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
}
"""Values that ask for nothing, as null, false and empty strings, lists and objects do too."""

IGNORED = frozenset(
    {
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "parallel_tool_calls",
        "spaces_between_special_tokens",
        "request_id",
    }
)
"""OpenAI and vLLM fields that cannot change the tokens of an answer here."""

_MAX_WARNED = 200
_warned: set[str] = set()


def check_extra_fields(request: WireModel) -> None:
    """Raise ApiError 400 for a refused field; warn once about an unknown one."""
    extra = request.model_extra or {}
    for name, value in extra.items():
        if name in REFUSED and not _asks_for_nothing(name, value, extra | request.__dict__):
            raise invalid(
                f"{name} is refused: {REFUSED[name]}", param=name, code="unsupported_field"
            )
        if name not in REFUSED and name not in IGNORED:
            _warn_once(name)
    if isinstance(request, ChatFields):
        _check_tools(request)
    if isinstance(request, (ChatRequest, CompletionRequest)) and request.stream_options:
        if not request.stream:
            raise invalid("stream_options needs stream: true", param="stream_options")
        for name in request.stream_options.model_extra or {}:
            if name not in {"include_obfuscation"}:
                _warn_once(f"stream_options.{name}")


def _asks_for_nothing(name: str, value: Any, fields: Mapping[str, Any]) -> bool:
    if value is None or value is False or value in ("", [], {}):
        return True
    if name == "best_of" and value == (fields.get("n") or 1):
        return True
    return any(
        value == neutral and type(value) is type(neutral) for neutral in NEUTRAL.get(name, ())
    )


def _check_tools(request: ChatFields) -> None:
    """Tools may be shown to the model, but its calls are not parsed; only `none` asks no more."""
    choice = request.tool_choice
    if isinstance(choice, dict) or choice not in (None, "none", "auto"):
        raise invalid(
            f'tool_choice {choice!r} cannot be forced; only "none" is served',
            param="tool_choice",
            code="unsupported_field",
        )
    if request.tools and choice != "none" and isinstance(request, ChatRequest):
        raise invalid(
            'tool calls are not parsed yet; send tool_choice: "none" to show the tools to the '
            "model and get its answer as plain text",
            param="tools",
            code="unsupported_field",
        )


def _warn_once(name: str) -> None:
    if name not in _warned and len(_warned) < _MAX_WARNED:
        _warned.add(name)
        logger.warning("request field %.100r is unknown and ignored (said once)", name)
