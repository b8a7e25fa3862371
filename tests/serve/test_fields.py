from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from lockstep.serve.bodies import parse_bytes
from lockstep.serve.errors import ApiError
from lockstep.serve.fields import IGNORED, NEUTRAL, REFUSED
from lockstep.serve.wire import ChatRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def parse_completion(**fields: Any) -> CompletionRequest:
    return parse_bytes(json.dumps({"prompt": "a"} | fields).encode(), CompletionRequest)


def parse_chat(**fields: Any) -> ChatRequest:
    return parse_bytes(json.dumps({"messages": MESSAGES} | fields).encode(), ChatRequest)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_field_says_why_unless_it_asks_for_nothing(name: str) -> None:
    with pytest.raises(ApiError, match=name) as caught:
        parse_completion(**{name: {"x": 1}})
    assert caught.value.param == name
    for nothing in (None, False, "", [], {}, *NEUTRAL.get(name, ())):
        parse_completion(**{name: nothing})


def test_best_of_equal_to_n_is_what_we_do() -> None:
    parse_completion(best_of=3, n=3)
    with pytest.raises(ApiError, match="best_of"):
        parse_completion(best_of=3, n=2)


def test_no_field_is_both_known_and_refused() -> None:
    declared = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
    assert not declared & REFUSED.keys()
    assert not declared & IGNORED
    assert not REFUSED.keys() & IGNORED


def test_an_unknown_field_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lockstep.serve"):
        parse_completion(frobnicate_once=1, user="me")
        parse_completion(frobnicate_once=2)
    assert [record.args for record in caplog.records] == [("frobnicate_once",)]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_tool_call_cannot_be_forced(choice: object) -> None:
    with pytest.raises(ApiError, match="tool_choice"):
        parse_chat(tools=[TOOL], tool_choice=choice)


def test_tools_are_shown_to_the_model_only_if_no_call_is_expected() -> None:
    with pytest.raises(ApiError, match="tool_choice"):
        parse_chat(tools=[TOOL])
    assert parse_chat(tools=[TOOL], tool_choice="none").tools == [TOOL]
    assert parse_chat(tools=[], tool_choice="auto").tools == []
