from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.errors import LockstepError, RequestError
from lockstep.core.sampling import MAX_LOGPROBS, MAX_STOP_STRINGS, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.0),
        ("max_tokens", True),
        ("min_tokens", 17),
        ("n", 0),
        ("n", 129),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: None}),
        ("seed", 2**64),
        ("seed", 1.5),
        ("stop", ("",)),
        ("stop", ("a",) * (MAX_STOP_STRINGS + 1)),
        ("logprobs", MAX_LOGPROBS + 1),
        ("prompt_logprobs", -1),
    ],
)
def test_invalid_value_is_refused_and_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("top_k", -1),
        ("top_p", 1.0),
        ("temperature", 0),
        ("temperature", 100),
        ("repetition_penalty", 0.1),
        ("logit_bias", {0: -100, 7: 100.0}),
        ("seed", 2**64 - 1),
        ("seed", -(2**63)),
        ("logprobs", 0),
        ("stop", ("a",) * MAX_STOP_STRINGS),
    ],
)
def test_values_on_the_edge_are_accepted(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_a_message_says_what_was_got_and_what_is_wanted() -> None:
    with pytest.raises(RequestError, match=r"^top_p must be above 0 and at most 1, got 1\.5$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(RequestError, match=r"^n must be from 1 to 128, got 0$"):
        SamplingParams(n=0)


@given(st.floats(min_value=0.0, max_value=100.0))
def test_only_temperature_zero_is_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).is_greedy == (temperature == 0.0)


def test_request_error_is_also_the_stdlib_error() -> None:
    error = RequestError("bad", param="n", code="invalid")
    assert isinstance(error, LockstepError)
    assert isinstance(error, ValueError)
    assert (error.param, error.code) == ("n", "invalid")
