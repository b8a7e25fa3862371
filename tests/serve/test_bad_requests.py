"""Whatever is sent, the answer is documented, and never 500."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.serve.config import HttpConfig
from lockstep.serve.wire import ChatRequest, CompletionRequest

WILD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.floats()
    | st.sampled_from([2**63, -(2**64), 10**400, "", "the", "7", [], {}, [[5]], [1, 2]])
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", ""]), "content": WILD},
        optional={"tool_calls": WILD, "name": WILD},
    ),
    max_size=3,
)
# Bounded, since a valid body really runs: at most n=40 answers of the default length.
FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields} - {"stream"})


def bodies(**base: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda fixed, wild: {"max_tokens": 4} | fixed | wild,
        st.fixed_dictionaries(base),
        st.dictionaries(st.sampled_from(FIELDS), WILD, max_size=4),
    )


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    route_and_body=st.one_of(
        st.tuples(st.just("/v1/completions"), bodies(prompt=st.just("the") | WILD)),
        st.tuples(st.just("/v1/chat/completions"), bodies(messages=MESSAGES)),
        st.tuples(st.just("/tokenize"), bodies(prompt=WILD)),
        st.tuples(st.just("/tokenize"), bodies(messages=MESSAGES)),
        st.tuples(st.just("/detokenize"), bodies(tokens=WILD)),
    )
)
def test_any_body_gets_a_documented_answer(
    http: httpx.Client, route_and_body: tuple[str, dict[str, Any]]
) -> None:
    route, body = route_and_body
    response = http.post(
        route, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert_error(response)


def assert_error(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def test_statuses_of_http_itself(http: httpx.Client) -> None:
    assert assert_error(http.get("/nowhere"))
    assert http.get("/nowhere").status_code == 404
    wrong_method = http.get("/v1/completions")
    assert wrong_method.status_code == 405
    assert_error(wrong_method)
    form = http.post("/v1/completions", data={"prompt": "a"})
    assert form.status_code == 415
    assert "application/json" in assert_error(form)["message"]


@pytest.mark.parametrize("name", ["%ff", "%ed%a0%80", "a/b", "%00", "x" * 5000, "..%2f"])
def test_strange_names_are_not_found(http: httpx.Client, name: str) -> None:
    response = http.get(f"/v1/models/{name}")
    assert response.status_code == 404
    assert_error(response)


def test_a_body_over_the_limit_gets_413(start_server: Any) -> None:
    server = start_server(http=HttpConfig(max_body_mib=1))
    body = {"prompt": "x" * (2 << 20)}
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 413
    assert "1048576" in assert_error(response)["message"]
    endless = (b" " * 65536 for _ in range(40))
    headers = {"content-type": "application/json"}
    chunked = server.http.post("/v1/completions", content=endless, headers=headers)
    assert chunked.status_code == 413


def test_a_key_is_wanted_where_the_model_is_used(start_server: Any) -> None:
    server = start_server(api_key="sesame")
    body = {"prompt": "a", "max_tokens": 1}
    for route in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic sesame"}):
            response = server.http.post(route, json=body, headers=headers)
            assert response.status_code == 401
            assert assert_error(response)["code"] == "invalid_api_key"
    key = {"authorization": "Bearer sesame"}
    assert server.http.post("/v1/completions", json=body, headers=key).status_code == 200
    for route in ("/health", "/ping", "/version", "/load", "/metrics"):
        assert server.http.get(route).status_code == 200


def test_a_client_that_goes_before_its_body_harms_nobody(tiny_server: Any) -> None:
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", tiny_server.port)) as s:
            s.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: 100\r\n\r\n{"
            )
    assert tiny_server.http.get("/health").status_code == 200


def test_a_model_is_found_by_each_of_its_names(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["tiny", "also-tiny"]
    assert http.get("/v1/models/also-tiny").json()["max_model_len"] == 256
    assert http.get("/v1/models/other").status_code == 404
    body = {"model": "also-tiny", "prompt": "a", "max_tokens": 1}
    assert http.post("/v1/completions", json=body).json()["model"] == "tiny"
