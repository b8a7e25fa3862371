"""What the client wrote, as token ids: completion prompts in their four forms, and chat messages.

Text that could block the event loop is tokenised in a thread, so one large prompt never delays the
neighbours' streams.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lockstep.serve.errors import invalid
from lockstep.serve.wire import ChatFields
from lockstep.text.tokenizer import Tokenizer

INLINE_CHARS = 4096
"""Longest text tokenised on the event loop itself: about a millisecond."""

MAX_PROMPTS = 1024

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ParsedPrompt:
    """One prompt of a request; `text` is None when it came as token ids."""

    token_ids: tuple[int, ...]
    text: str | None = None


def split_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """Tell a string, strings, token ids and lists of token ids apart; ApiError 400 for others."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt is an empty list; give text or token ids", param="prompt")
    if all(map(_is_token_id, prompt)):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        message = (
            f"prompt has {len(prompt)} entries; at most {MAX_PROMPTS} are served in one request"
        )
        raise invalid(message, param="prompt")
    if all(isinstance(entry, str) for entry in prompt):
        return list(prompt)
    if all(isinstance(entry, list) and all(map(_is_token_id, entry)) for entry in prompt):
        return list(prompt)
    raise invalid(
        "prompt must be a string, strings, a list of token ids or lists of token ids",
        param="prompt",
        code="invalid_type",
    )


async def encode_prompt(
    prompt: str | list[int], tokenizer: Tokenizer, *, vocab_size: int, add_special_tokens: bool
) -> ParsedPrompt:
    if isinstance(prompt, str):
        ids = await off_loop_if_large(
            len(prompt), lambda: tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        )
        parsed = ParsedPrompt(token_ids=tuple(ids), text=prompt)
    else:
        check_token_ids(prompt, vocab_size, param="prompt")
        parsed = ParsedPrompt(token_ids=tuple(prompt))
    if not parsed.token_ids:
        raise invalid("the prompt has no tokens; give at least one", param="prompt")
    return parsed


def check_token_ids(ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            message = (
                f"{param} has token id {token}; this model's ids go from 0 to {vocab_size - 1}"
            )
            raise invalid(message, param=param)


async def encode_chat(request: ChatFields, tokenizer: Tokenizer) -> ParsedPrompt:
    """Messages through the model's template; ApiError 400 where they do not allow it."""
    if not request.messages:
        raise invalid("messages is missing or empty; give at least one", param="messages")
    messages = [_clean_message(message, index) for index, message in enumerate(request.messages)]
    size = sum(len(str(message.get("content"))) for message in messages)

    def render_and_encode() -> ParsedPrompt:
        text = render_chat(request, messages, tokenizer)
        ids = tokenizer.encode(text, add_special_tokens=bool(request.add_special_tokens))
        return ParsedPrompt(token_ids=tuple(ids), text=text)

    parsed = await off_loop_if_large(size, render_and_encode)
    if not parsed.token_ids:
        raise invalid("the messages render to an empty prompt", param="messages")
    return parsed


def render_chat(request: ChatFields, messages: list[dict[str, Any]], tokenizer: Tokenizer) -> str:
    template = tokenizer.chat_template
    if template is None:
        raise invalid(
            "this model has no chat template; use /v1/completions",
            param="messages",
            code="no_chat_template",
        )
    continues = bool(request.continue_final_message)
    generates = (
        not continues if request.add_generation_prompt is None else request.add_generation_prompt
    )
    if continues and generates:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    clash = kwargs.keys() & {"messages", "tools", "add_generation_prompt"}
    if clash:
        message = (
            f"chat_template_kwargs may not hold {sorted(clash)[0]!r}; it is a field of the request"
        )
        raise invalid(message, param="chat_template_kwargs")
    text = template.render(
        messages, tools=request.tools or None, add_generation_prompt=generates, **kwargs
    )
    return _cut_after_final_content(text, messages) if continues else text


def _cut_after_final_content(text: str, messages: list[dict[str, Any]]) -> str:
    """Drop what the template writes after the last message, so that the model goes on with it."""
    content = messages[-1].get("content")
    if not isinstance(content, str) or not content.strip():
        message = "continue_final_message needs text in the last message"
        raise invalid(message, param="continue_final_message")
    for form in (content, content.lstrip(), content.strip()):  # templates may trim
        start = text.rfind(form)
        if start >= 0:
            return text[: start + len(form)]
    raise invalid(
        "the chat template changes the last message, so it cannot be continued",
        param="continue_final_message",
    )


def _clean_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise invalid(f"{where}.role must be a non-empty string", param="messages")
    cleaned = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_of(part, where) for part in content)
    elif content is None:
        if role != "assistant" or not (message.get("tool_calls") or message.get("function_call")):
            raise invalid(f"{where}.content is missing", param="messages", code="missing_field")
        content = ""
    elif not isinstance(content, str):
        raise invalid(f"{where}.content must be a string or a list of parts", param="messages")
    cleaned["content"] = content
    if message.get("tool_calls"):
        cleaned["tool_calls"] = [
            _clean_call(call, where) for call in _as_list(message["tool_calls"])
        ]
    return cleaned


def _text_of(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise invalid(f"{where}.content has a part that is not an object", param="messages")
    if part.get("type") != "text":
        raise invalid(
            f"{where}.content has a part of type {str(part.get('type'))[:50]!r}; this model "
            "takes text only",
            param="messages",
            code="unsupported_content",
        )
    if not isinstance(part.get("text"), str):
        raise invalid(f"{where}.content has a text part without text", param="messages")
    return str(part["text"])


def _clean_call(call: object, where: str) -> dict[str, Any]:
    """Templates want a call's arguments as an object; the wire has them as a JSON string."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise invalid(f"{where}.tool_calls has an entry without a function", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            message = f"{where}.tool_calls has arguments that are not JSON"
            raise invalid(message, param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


async def off_loop_if_large(size: int, work: Callable[[], Result]) -> Result:
    return work() if size <= INLINE_CHARS else await asyncio.to_thread(work)
