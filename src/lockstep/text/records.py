"""Records of text in the formats people have, turned into two kinds: conversation and plain text.

| keys of a record | read as | |---|---| | `messages` (and `tools`) | a conversation; every
assistant turn is trained on | | `prompt`, `completion`, both lists of messages | a conversation;
turns of the completion are trained on | | `prompt`, `completion`, both strings | plain text; the
completion is trained on | | `text` | plain text, all of it trained on | | `conversations` of
`from`, `value` (ShareGPT) | a conversation | | `instruction`, `output`, `input`, `system`,
`history` (Alpaca) | a conversation |

Which one a record is follows from its keys, record by record. Raises DataError without file and
line, which the caller adds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.core.errors import DataError

Record = Mapping[str, Any]
Message = dict[str, Any]

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "system": "system",
}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Chat messages for the model's chat template."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    first_trained: int = 0
    """Assistant messages before this index are context only."""


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """Text outside any chat template; the end-of-sequence token is added after the completion."""

    prompt: str
    completion: str


def parse_record(record: Any) -> Conversation | PlainText:
    """The record as a conversation or plain text; DataError says what was found instead."""
    if not isinstance(record, Mapping):
        raise DataError(f"a record must be an object, got {type(record).__name__}")
    record = {key: value for key, value in record.items() if value is not None}
    if "messages" in record:
        return Conversation(messages=_messages(record["messages"]), tools=_tools(record))
    if "conversations" in record:
        return _from_sharegpt(record)
    if "prompt" in record and "completion" in record:
        return _from_prompt_completion(record)
    if "instruction" in record and "output" in record:
        return _from_alpaca(record)
    if "text" in record:
        return PlainText(prompt="", completion=_string(record, "text"))
    raise DataError(
        f"no known format has the keys {', '.join(sorted(record)) or '(none)'}; give messages, "
        "prompt and completion, text, conversations (ShareGPT), or instruction and output (Alpaca)"
    )


def _from_prompt_completion(record: Record) -> Conversation | PlainText:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return PlainText(prompt=prompt, completion=completion)
    if _is_list(prompt) and _is_list(completion):
        return Conversation(
            messages=_messages(prompt) + _messages(completion),
            tools=_tools(record),
            first_trained=len(prompt),
        )
    raise DataError(
        f"prompt is {type(prompt).__name__} and completion {type(completion).__name__}; "
        "give two strings or two lists of messages"
    )


def _from_sharegpt(record: Record) -> Conversation:
    turns = record["conversations"]
    if not _is_list(turns):
        raise DataError(f"conversations must be a list, got {type(turns).__name__}")
    messages: list[Message] = []
    if "system" in record:
        messages.append({"role": "system", "content": _string(record, "system")})
    for index, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
            raise DataError(f"conversations[{index}] must have `from` and a string `value`")
        if turn.get("from") not in _SHAREGPT_ROLES:
            known = ", ".join(_SHAREGPT_ROLES)
            raise DataError(f"conversations[{index}].from is {turn.get('from')!r}; known: {known}")
        messages.append({"role": _SHAREGPT_ROLES[turn["from"]], "content": turn["value"]})
    return Conversation(messages=tuple(messages), tools=_tools(record))


def _from_alpaca(record: Record) -> Conversation:
    messages: list[Message] = []
    if record.get("system"):
        messages.append({"role": "system", "content": _string(record, "system")})
    for index, pair in enumerate(record.get("history", ())):
        if not _is_list(pair) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"history[{index}] must be a pair of strings, question and answer")
        messages.append({"role": "user", "content": pair[0]})
        messages.append({"role": "assistant", "content": pair[1]})
    first_trained = len(messages)
    question = _string(record, "instruction")
    if record.get("input"):
        question = f"{question}\n\n{_string(record, 'input')}"
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": _string(record, "output")})
    return Conversation(messages=tuple(messages), first_trained=first_trained)


def _messages(value: Any) -> tuple[Message, ...]:
    if not _is_list(value) or not value:
        raise DataError(f"messages must be a list of at least one message, got {value!r:.60}")
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"messages[{index}] must be an object with a string `role`")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise DataError(f"messages[{index}] has neither `content` nor `tool_calls`")
        if content is not None and not isinstance(content, str) and not _is_list(content):
            raise DataError(
                f"messages[{index}].content must be a string, got {type(content).__name__}"
            )
    return tuple(_without_nulls(message) for message in value)


def _tools(record: Record) -> tuple[dict[str, Any], ...] | None:
    tools = record.get("tools")
    if isinstance(tools, str):  # columnar files often hold schemas as JSON text
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise DataError(f"tools is a string but not JSON: {error}") from error
    if not tools:
        return None
    if not _is_list(tools) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError("tools must be a list of JSON schemas")
    return tuple(_without_nulls(tool) for tool in tools)


def _string(record: Record, key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise DataError(f"{key} must be a string, got {type(value).__name__}")
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _without_nulls(value: Any) -> Any:
    """Parquet gives every struct all the fields of the column, null where a record had none."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if _is_list(value) else value
