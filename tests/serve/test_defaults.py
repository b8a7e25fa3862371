from __future__ import annotations

from typing import Any

import pytest

from lockstep.core.errors import RequestError
from lockstep.core.sampling import SamplingParams
from lockstep.serve.defaults import GenerationDefaults, sampling_params
from lockstep.serve.errors import ApiError
from lockstep.serve.wire import ChatRequest, CompletionRequest, GenerationRequest

CONTEXT = 100


def params_of(
    request: GenerationRequest, *, prompt_tokens: int = 10, **defaults: Any
) -> SamplingParams:
    return sampling_params(
        request,
        GenerationDefaults(**defaults),
        prompt_tokens=prompt_tokens,
        max_model_len=CONTEXT,
    )


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": "hi"}], **fields)


def test_the_request_wins_over_the_model_and_the_model_over_the_neutral_value() -> None:
    params = params_of(chat(temperature=0.5), temperature=0.7, top_k=20)
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 20, 1.0)


def test_a_zero_in_the_request_is_a_value() -> None:
    params = params_of(chat(temperature=0, top_k=0, min_p=0), temperature=0.7, top_k=20, min_p=0.1)
    assert (params.temperature, params.top_k, params.min_p) == (0.0, 0, 0.0)


def test_generation_config_gives_numbers_only() -> None:
    config = {
        "temperature": 0.6,
        "top_k": None,
        "top_p": "0.9",
        "min_p": True,
        "repetition_penalty": float("nan"),
        "max_new_tokens": 7,
        "do_sample": True,
        "eos_token_id": [1, 2],
    }
    assert GenerationDefaults.from_generation_config(config) == GenerationDefaults(
        temperature=0.6, max_tokens=7
    )


def test_an_answer_may_fill_the_context_unless_something_says_less() -> None:
    assert params_of(chat()).max_tokens == 90
    assert params_of(CompletionRequest(prompt="a")).max_tokens == 16
    assert params_of(chat(), max_tokens=7).max_tokens == 7
    assert params_of(chat(max_tokens=5, max_completion_tokens=6)).max_tokens == 6
    assert params_of(CompletionRequest(prompt="a"), prompt_tokens=95).max_tokens == 5


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens"), [(10, 91), (100, 1), (101, 0), (150, None)]
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    prompt_tokens: int, max_tokens: int | None
) -> None:
    with pytest.raises(ApiError, match=str(prompt_tokens)) as caught:
        params_of(CompletionRequest(prompt="a", max_tokens=max_tokens), prompt_tokens=prompt_tokens)
    assert caught.value.code == "context_length_exceeded"


def test_a_prompt_that_fills_the_context_can_be_scored() -> None:
    request = CompletionRequest(prompt="a", max_tokens=0, echo=True, logprobs=1)
    params = params_of(request, prompt_tokens=CONTEXT)
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (0, 1, 1)


def test_logprobs_of_both_formats() -> None:
    assert params_of(chat(logprobs=True)).logprobs == 0
    assert params_of(chat(logprobs=True, top_logprobs=3)).logprobs == 3
    assert params_of(chat(logprobs=False)).logprobs is None
    assert params_of(CompletionRequest(prompt="a", logprobs=2)).prompt_logprobs is None
    with pytest.raises(ApiError, match="logprobs: true"):
        params_of(chat(top_logprobs=3))


def test_stop_and_logit_bias() -> None:
    assert params_of(chat(stop="x")).stop == ("x",)
    assert params_of(chat(stop=["x", "yy"])).stop == ("x", "yy")
    assert params_of(chat(logit_bias={"7": -100.0})).logit_bias == {7: -100.0}
    with pytest.raises(ApiError, match="token ids"):
        params_of(chat(logit_bias={"the": 1.0}))
    with pytest.raises(ApiError, match="1024"):
        params_of(chat(stop="x" * 1_000_000))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_k", -2),
        ("n", 0),
        ("n", 10**9),
        ("min_tokens", 91),
        ("seed", 2**64),
        ("presence_penalty", 2.1),
        ("repetition_penalty", 0.0),
        ("prompt_logprobs", 65),
        ("stop", [""]),
        ("max_tokens", -1),
    ],
)
def test_out_of_range_names_the_field(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        params_of(chat(**{field: value}))
    assert caught.value.param == field
