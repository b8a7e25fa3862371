"""/v1/chat/completions through the official client."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

MESSAGES: list[Any] = [{"role": "user", "content": "the thing"}]


def ask(
    client: OpenAI,
    *,
    messages: list[Any] = MESSAGES,
    extra: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    options = {"max_tokens": 12, "seed": 3} | fields
    return client.chat.completions.create(
        model="tiny", messages=messages, extra_body={"ignore_eos": True} | (extra or {}), **options
    )


def test_a_plain_answer(client: OpenAI) -> None:
    answer = ask(client)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint.startswith("lockstep-")
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert choice.seed == 3
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_as_clients_expect_it(client: OpenAI) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    first, *middle, last, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].finish_reason is None for chunk in (first, *middle))
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    text = "".join(chunk.choices[0].delta.content for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content


def test_the_bytes_of_a_stream(tiny_server: Any) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True}
    with tiny_server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        text = response.read().decode()
    assert response.headers["content-type"].startswith("text/event-stream")
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])


def test_usage_with_every_chunk(client: OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_a_reported_seed_repeats_the_answer(client: OpenAI) -> None:
    first = ask(client, seed=None, temperature=1.0)
    again = ask(client, seed=first.choices[0].seed, temperature=1.0)
    other = ask(client, seed=None, temperature=1.0)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert other.choices[0].seed != first.choices[0].seed


def test_n_samples_differ_and_stream_side_by_side(client: OpenAI) -> None:
    whole = ask(client, n=3)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert whole.usage.completion_tokens == 36
    streamed = ["", "", ""]
    for chunk in ask(client, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content
    assert streamed == texts


def test_logprobs(client: OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=2, extra={"return_token_ids": True})
    choice = answer.choices[0]
    assert len(choice.logprobs.content) == len(choice.token_ids) == 12
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob >= entry.logprob
    spelled = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert spelled.decode(errors="replace") == choice.message.content
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens


def test_raw_and_sampling_logprobs_are_told_apart(client: OpenAI) -> None:
    greedy = ask(client, logprobs=True, temperature=0).choices[0].logprobs.content
    assert {entry.sampling_logprob for entry in greedy} == {0.0}
    assert all(entry.logprob < 0 for entry in greedy)
    plain = ask(client, logprobs=True, temperature=1).choices[0].logprobs.content
    assert all(entry.sampling_logprob == entry.logprob for entry in plain)


def test_prompt_logprobs(client: OpenAI) -> None:
    answer = ask(client, extra={"prompt_logprobs": 1, "return_token_ids": True})
    first, *others = answer.prompt_logprobs
    assert first is None
    for token, entry in zip(answer.prompt_token_ids[1:], others, strict=True):
        assert entry[str(token)]["rank"] >= 1
        assert entry[str(token)]["logprob"] <= 0


def test_cached_tokens_are_counted(client: OpenAI) -> None:
    messages = [
        {"role": "user", "content": "a prompt of its own, longer than two blocks of the cache"}
    ]
    first = ask(client, messages=messages)
    again = ask(client, messages=messages)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens >= 32
    assert again.choices[0].message.content == first.choices[0].message.content


def test_the_tokens_are_those_of_the_tokenize_route(client: OpenAI, tiny_server: Any) -> None:
    answer = ask(client, extra={"return_token_ids": True})
    tokens = tiny_server.http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert tokens["tokens"] == answer.prompt_token_ids
    text = tiny_server.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert text["prompt"] == "<|im_start|>user\nthe thing<|im_end|>\n<|im_start|>assistant\n"


def test_an_unknown_model_and_a_bad_value_are_openai_errors(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as missing:
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as bad:
        ask(client, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(BadRequestError, match="256") as long:
        ask(client, messages=[{"role": "user", "content": "x" * 300}])
    assert long.value.code == "context_length_exceeded"


def test_tools_and_json_mode_are_refused_clearly(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="structured output"):
        ask(client, response_format={"type": "json_object"})
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(BadRequestError, match="tool"):
        ask(client, tools=[tool])
    assert ask(client, tools=[tool], tool_choice="none").choices
