from __future__ import annotations

from typing import Any

import pytest

from lockstep.core.errors import DataError
from lockstep.text.records import Conversation, PlainText, parse_record

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}


def test_messages_with_tools_as_json_text() -> None:
    record = {"messages": [USER, ASSISTANT], "tools": '[{"name": "clock"}]'}
    assert parse_record(record) == Conversation(
        messages=(USER, ASSISTANT), tools=({"name": "clock"},)
    )


def test_nulls_that_parquet_fills_in_are_dropped() -> None:
    record = {"messages": [{**USER, "tool_calls": None}, ASSISTANT], "text": None}
    assert parse_record(record) == Conversation(messages=(USER, ASSISTANT))


def test_prompt_and_completion_as_messages_train_on_the_completion() -> None:
    record = {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]}
    assert parse_record(record) == Conversation(
        messages=(USER, ASSISTANT, USER, ASSISTANT), first_trained=3
    )


def test_prompt_and_completion_as_strings() -> None:
    record = {"prompt": "2+2=", "completion": "4"}
    assert parse_record(record) == PlainText(prompt="2+2=", completion="4")


def test_text() -> None:
    assert parse_record({"text": "once"}) == PlainText(prompt="", completion="once")


def test_sharegpt() -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    assert parse_record({"conversations": turns, "system": "Be kind."}) == Conversation(
        messages=({"role": "system", "content": "Be kind."}, USER, ASSISTANT)
    )


def test_alpaca_trains_on_the_output_not_on_the_history() -> None:
    record = {
        "instruction": "Add",
        "input": "2 3",
        "output": "5",
        "history": [["hi", "hello"]],
        "system": "",
    }
    assert parse_record(record) == Conversation(
        messages=(
            USER,
            ASSISTANT,
            {"role": "user", "content": "Add\n\n2 3"},
            {"role": "assistant", "content": "5"},
        ),
        first_trained=2,
    )


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1], "must be an object, got list"),
        ({"question": "?", "answer": "!"}, "no known format has the keys answer, question"),
        ({"messages": []}, "at least one message"),
        (
            {"messages": [{"content": "hi"}]},
            r"messages\[0\] must be an object with a string",
        ),
        ({"messages": [USER, {"role": "assistant"}]}, r"messages\[1\] has neither"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be a string, got int"),
        ({"prompt": "a", "completion": [ASSISTANT]}, "prompt is str and completion list"),
        ({"conversations": [{"from": "martian", "value": "x"}]}, "'martian'; known: human"),
        ({"instruction": "a", "output": 5}, "output must be a string, got int"),
        ({"messages": [USER], "tools": "{"}, "not JSON"),
    ],
)
def test_what_cannot_be_used_is_named(record: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        parse_record(record)
