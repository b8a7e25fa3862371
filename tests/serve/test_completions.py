"""/v1/completions through the official client."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, OpenAI


def ask(
    client: OpenAI, prompt: Any = "the thing", *, extra: dict[str, Any] | None = None, **fields: Any
) -> Any:
    options = {"max_tokens": 8, "seed": 3} | fields
    return client.completions.create(
        model="tiny", prompt=prompt, extra_body={"ignore_eos": True} | (extra or {}), **options
    )


def tokens_of(server: Any, text: str) -> list[int]:
    answer = server.http.post("/tokenize", json={"prompt": text}).json()
    return list(answer["tokens"])


def test_the_four_forms_of_a_prompt_give_the_same(client: OpenAI, tiny_server: Any) -> None:
    texts = ["the thing", "in all"]
    ids = [tokens_of(tiny_server, text) for text in texts]
    alone = [ask(client, text).choices[0].text for text in texts]
    assert [choice.text for choice in ask(client, texts).choices] == alone
    assert [choice.text for choice in ask(client, ids).choices] == alone
    assert ask(client, ids[0]).choices[0].text == alone[0]


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(client: OpenAI) -> None:
    answer = ask(client, ["the thing", "in all"], n=2, extra={"return_token_ids": True})
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    prompts = [choice.prompt_token_ids for choice in answer.choices]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert answer.usage.completion_tokens == 32
    assert answer.usage.prompt_tokens == len(prompts[0]) + len(prompts[2])


def test_sixteen_tokens_by_default(client: OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="a", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_logprobs_and_offsets(client: OpenAI) -> None:
    choice = ask(client, logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 8
    assert logprobs.text_offset[0] == 0
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == logprob
        assert 2 <= len(top) <= 3


def test_an_echoed_prompt_is_scored_as_lm_eval_asks(client: OpenAI, tiny_server: Any) -> None:
    """Its request: token ids, echo, logprobs 1, max_tokens 1; the last entry is the new token."""
    ids = tokens_of(tiny_server, "the thing in all")
    choice = ask(client, [ids], max_tokens=1, temperature=0, echo=True, logprobs=1).choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.token_logprobs) == len(ids) + 1
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert choice.text.startswith("the thing in all")
    scored = ask(client, ids, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert scored.text == "the thing in all"
    assert scored.finish_reason == "length"
    assert scored.logprobs.token_logprobs == logprobs.token_logprobs[:-1]
    for token, offset in zip(scored.logprobs.tokens, scored.logprobs.text_offset, strict=True):
        assert scored.text[offset:].startswith(token)


def test_a_prompt_scored_is_an_answer_generated(client: OpenAI) -> None:
    """The same tokens have bitwise the same logprobs, drawn or given."""
    drawn = ask(client, logprobs=0, extra={"return_token_ids": True}).choices[0]
    ids = drawn.prompt_token_ids + drawn.token_ids
    given = ask(client, ids, max_tokens=0, echo=True, logprobs=0).choices[0]
    assert given.logprobs.token_logprobs[-8:] == drawn.logprobs.token_logprobs


def test_echo_streams_the_prompt_first(client: OpenAI) -> None:
    chunks = list(ask(client, echo=True, stream=True, n=2))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {c.index: c.text for c in ask(client, echo=True, n=2).choices}
    assert all(text.startswith("the thing") for text in texts.values())


def test_stop_strings_and_tokens_say_what_stopped(client: OpenAI) -> None:
    whole = ask(client, max_tokens=40, extra={"return_token_ids": True}).choices[0]
    stop = whole.text[5:7]
    cut = ask(client, max_tokens=40, stop=[stop, "never comes"]).choices[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    kept = ask(client, max_tokens=40, stop=stop, extra={"include_stop_str_in_output": True})
    assert kept.choices[0].text == cut.text + stop
    token = whole.token_ids[3]
    ended = ask(client, max_tokens=40, extra={"stop_token_ids": [token]}).choices[0]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", token)


def test_sampling_fields_reach_the_engine(client: OpenAI, tiny_server: Any) -> None:
    token = tokens_of(tiny_server, "z")[0]
    assert ask(client, logit_bias={str(token): 100}).choices[0].text == "z" * 8
    greedy = ask(client, temperature=0).choices[0].text
    assert ask(client, extra={"top_k": 1}).choices[0].text == greedy
    assert ask(client, extra={"min_p": 1.0}).choices[0].text == greedy
    assert ask(client, top_p=1e-9).choices[0].text == greedy
    assert ask(client, extra={"priority": -5}).choices[0].text == ask(client).choices[0].text
    assert (
        ask(client, extra={"repetition_penalty": 5.0}).choices[0].text
        != ask(client).choices[0].text
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 255}, "max_tokens"),
        ({"extra": {"stop_token_ids": [-1]}}, "stop_token_ids"),
        ({"n": 129}, "n"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
        ({"logprobs": 65}, "logprobs"),
    ],
)
def test_what_cannot_be_served_is_refused(
    client: OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.param == param
