from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.errors import RequestError
from lockstep.serve.errors import ApiError
from lockstep.serve.prompts import encode_chat, encode_prompt, split_prompts
from lockstep.serve.wire import ChatRequest
from lockstep.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


def rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]], **fields: Any) -> str:
    request = ChatRequest(messages=messages, **fields)
    text = asyncio.run(encode_chat(request, tokenizer)).text
    assert text is not None
    return text


@pytest.mark.parametrize(
    ("prompt", "entries"),
    [
        ("ab", ["ab"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [""]),
        ([[]], [[]]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, entries: list[Any]) -> None:
    assert split_prompts(prompt) == entries


@pytest.mark.parametrize(
    "prompt", [[], [1, "a"], [[1], "a"], [True], [1.5], [None], [["a"]], [[[1]]], ["a"] * 2000]
)
def test_other_forms_are_refused(prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        split_prompts(prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", ["", [], [-1], [10**30], [9999]])
def test_prompts_without_tokens_or_with_foreign_ones_are_refused(
    tokenizer: Tokenizer, prompt: Any
) -> None:
    encoding = encode_prompt(
        prompt, tokenizer, vocab_size=tokenizer.vocab_size, add_special_tokens=True
    )
    with pytest.raises(ApiError) as caught:
        asyncio.run(encoding)
    assert caught.value.param == "prompt"


def test_large_text_gives_the_same_tokens_off_the_loop(tokenizer: Tokenizer) -> None:
    text = "the thing " * 1000
    encoding = encode_prompt(
        text, tokenizer, vocab_size=tokenizer.vocab_size, add_special_tokens=False
    )
    assert list(asyncio.run(encoding).token_ids) == tokenizer.encode(text)


def test_messages_go_through_the_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}]
    head = "<|im_start|>user\na\nb<|im_end|>\n"
    assert rendered(tokenizer, messages) == head + "<|im_start|>assistant\n"
    assert rendered(tokenizer, messages, add_generation_prompt=False) == head


def test_the_final_message_can_be_continued(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so a"}]
    text = rendered(tokenizer, messages, continue_final_message=True)
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nso a"
    with pytest.raises(ApiError, match="exclude"):
        rendered(tokenizer, messages, continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{}],
        [{"role": "user"}],
        [{"role": 1, "content": "a"}],
        [{"role": "", "content": "a"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [1]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "tool_calls": [1]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    ],
)
def test_bad_messages_are_refused(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> None:
    with pytest.raises((ApiError, RequestError)) as caught:
        rendered(tokenizer, messages)
    assert caught.value.param == "messages"


def test_template_kwargs_may_not_replace_what_the_request_says(tokenizer: Tokenizer) -> None:
    with pytest.raises(ApiError, match="messages"):
        rendered(
            tokenizer,
            [{"role": "user", "content": "a"}],
            chat_template_kwargs={"messages": []},
        )
