"""Bodies that are not what they should be get 400 with a sentence, and never anything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.serve.bodies import parse_bytes
from lockstep.serve.errors import ApiError
from lockstep.serve.wire import ChatRequest, CompletionRequest

FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, "suffix", "tools"})

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=5)
    | st.sampled_from([2**63, -(2**64), 10**400, "7", "", [], {}]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b"", None, "invalid_json"),
        (b"{", None, "invalid_json"),
        (b"[]", None, "invalid_type"),
        (b"null", None, "invalid_type"),
        (b'{"prompt": "\xff"}', None, "invalid_json"),
        (b'{"prompt": "\\ud800"}', None, "invalid_json"),
        (b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", None, "invalid_json"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", None, "invalid_json"),
        (b"{}", "prompt", "missing_field"),
        (b'{"prompt": 1}', "prompt", "invalid_type"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature", "invalid_type"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature", "invalid_type"),
        (b'{"prompt": "a", "temperature": "1"}', "temperature", "invalid_type"),
        (b'{"prompt": "a", "temperature": true}', "temperature", "invalid_type"),
        (b'{"prompt": "a", "max_tokens": 1.5}', "max_tokens", "invalid_type"),
        (b'{"prompt": "a", "n": true}', "n", "invalid_type"),
        (b'{"prompt": "a", "stop": [1]}', "stop", "invalid_type"),
        (b'{"prompt": "a", "logit_bias": {"5": "x"}}', "logit_bias", "invalid_type"),
        (
            b'{"prompt": "a", "stream_options": {"include_usage": 1}, "stream": true}',
            "stream_options",
            None,
        ),
        (b'{"prompt": "a", "stream_options": {}}', "stream_options", None),
    ],
)
def test_a_bad_body_names_its_fault(body: bytes, param: str | None, code: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse_bytes(body, CompletionRequest)
    error = caught.value.body()["error"]
    assert caught.value.status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert len(error["message"]) < 600
    if code is not None:
        assert error["code"] == code


def test_null_means_not_given() -> None:
    body = dict.fromkeys(CompletionRequest.model_fields) | {"prompt": "a"}
    request = parse_bytes(json.dumps(body).encode(), CompletionRequest)
    assert request == CompletionRequest(prompt="a")


@given(body=st.binary(max_size=40))
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    assert_parsed_or_refused(body)


@given(
    fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=4), JSON_VALUES, max_size=5)
)
def test_any_json_is_parsed_or_refused(fields: dict[str, Any]) -> None:
    assert_parsed_or_refused(json.dumps(fields).encode())


def assert_parsed_or_refused(body: bytes) -> None:
    for kind in (CompletionRequest, ChatRequest):
        refused = refusal_of(body, kind)
        if refused is not None:
            assert refused.status == 400
            json.dumps(refused.body(), allow_nan=False)


def refusal_of(body: bytes, kind: type[CompletionRequest | ChatRequest]) -> ApiError | None:
    try:
        parse_bytes(body, kind)
    except ApiError as error:
        return error
    return None
