"""However an answer is cut into events, the events add up to the unstreamed answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Random weights write random bytes, so most characters come in pieces and short stops are hit.
STOPS = st.lists(
    st.sampled_from(["a", "th", "\ufffd", "\ufffd\ufffd", "e\ufffd", "<|im_end|>", "~", "\n"]),
    max_size=3,
)

COMMON = {
    "max_tokens": st.integers(0, 24),
    "n": st.integers(1, 3),
    "seed": st.integers(0, 50),
    "temperature": st.sampled_from([0.0, 0.7, 1.5]),
    "stop": STOPS,
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "return_token_ids": st.booleans(),
    "prompt_logprobs": st.none() | st.integers(0, 2),
    "top_k": st.sampled_from([0, 5]),
}
COMPLETION = st.fixed_dictionaries(
    COMMON
    | {
        "prompt": st.sampled_from(["the thing", ["in", "an all"], [5, 6, 7], [[1], [200, 201]]]),
        "echo": st.booleans(),
        "logprobs": st.none() | st.integers(0, 2),
    }
)
CHAT = st.fixed_dictionaries(
    COMMON
    | {
        "messages": st.just([{"role": "user", "content": "the thing"}]),
        "logprobs": st.booleans(),
    }
)
EXAMPLES = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@EXAMPLES
@given(body=COMPLETION)
def test_completions(http: httpx.Client, body: dict[str, Any]) -> None:
    whole = post(http, "/v1/completions", body)
    streamed = stream(http, "/v1/completions", body)
    expected = [without_nulls(choice) for choice in whole["choices"]]
    assert joined(streamed[:-1], len(expected)) == expected
    assert streamed[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert streamed[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


@EXAMPLES
@given(body=CHAT)
def test_chat(http: httpx.Client, body: dict[str, Any]) -> None:
    whole = post(http, "/v1/chat/completions", body)
    streamed = stream(http, "/v1/chat/completions", body)
    expected = []
    for choice in whole["choices"]:
        message = choice.pop("message")
        expected.append(without_nulls(choice) | {"text": message["content"]})
    for chunk in streamed:
        for choice in chunk["choices"]:
            choice["text"] = choice.pop("delta")["content"]
    assert joined(streamed[:-1], len(expected)) == expected
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert streamed[0].get(name) == whole.get(name)


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", path, json=asked) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def joined(chunks: list[Any], count: int) -> list[dict[str, Any]]:
    """Add chunks up as a client does: texts and lists are concatenated, the rest is set."""
    choices: list[dict[str, Any]] = [{} for _ in range(count)]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        add(choices[choice["index"]], choice)
    return [without_nulls(choice) for choice in choices]


def add(into: dict[str, Any], piece: dict[str, Any]) -> None:
    for name, value in piece.items():
        if value is None:
            into.setdefault(name, None)
        elif isinstance(value, dict):
            into[name] = into.get(name) or {}
            add(into[name], value)
        elif isinstance(value, (str, list)) and name not in ("finish_reason", "stop_reason"):
            into[name] = (into.get(name) or type(value)()) + value
        else:
            into[name] = value


def without_nulls(choice: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in choice.items() if value is not None}
