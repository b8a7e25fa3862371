"""A client that leaves, stalls or asks for nonsense changes nothing for the others."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

ANSWER = {
    "prompt": "the thing",
    "max_tokens": 120,
    "seed": 11,
    "ignore_eos": True,
    "logprobs": 1,
    "return_token_ids": True,
}


def stream(server: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All choices of the stream, but for what names the request."""
    asked = body | {"stream": True}
    with server.http.stream("POST", "/v1/completions", json=asked, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [choice for line in lines for choice in json.loads(line)["choices"]]


def add_up(choices: list[dict[str, Any]]) -> tuple[str, list[int], list[float]]:
    return (
        "".join(choice["text"] for choice in choices),
        [token for choice in choices for token in choice["token_ids"]],
        [value for choice in choices for value in choice["logprobs"]["token_logprobs"]],
    )


def leave_mid_stream(server: Any, **fields: Any) -> None:
    body = ANSWER | {"prompt": "another", "stream": True, "n": 2} | fields
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_idle(server: Any) -> bool:
    running = server.metric("vllm:num_requests_running")
    waiting = server.metric("vllm:num_requests_waiting")
    return running == waiting == 0 and server.http.get("/load").json() == {"server_load": 0}


def test_a_neighbour_streams_the_same_bits_in_a_storm(tiny_server: Any) -> None:
    alone = add_up(stream(tiny_server, ANSWER))
    storm_is_over = threading.Event()

    def storm(number: int) -> None:
        while not storm_is_over.is_set():
            leave_mid_stream(tiny_server, seed=number)
            tiny_server.http.post("/v1/completions", content=b"{")
            tiny_server.http.post("/v1/completions", json=ANSWER | {"max_tokens": 10**9})

    threads = [threading.Thread(target=storm, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        among_others = [add_up(stream(tiny_server, ANSWER)) for _ in range(3)]
    finally:
        storm_is_over.set()
        for thread in threads:
            thread.join()
    assert among_others == [alone] * 3
    wait_until(lambda: is_idle(tiny_server))


def test_a_client_that_leaves_stops_costing_at_once(tiny_server: Any) -> None:
    wait_until(lambda: is_idle(tiny_server))
    aborted = tiny_server.metric("vllm:request_success_total", finished_reason="abort")
    tokens = tiny_server.metric("vllm:generation_tokens_total")
    leave_mid_stream(tiny_server, max_tokens=240)
    wait_until(lambda: is_idle(tiny_server))
    assert tiny_server.metric("vllm:request_success_total", finished_reason="abort") > aborted
    assert tiny_server.metric("vllm:generation_tokens_total") - tokens < 400


def test_a_client_that_leaves_an_unstreamed_answer_is_noticed_too(tiny_server: Any) -> None:
    aborted = tiny_server.metric("vllm:request_success_total", finished_reason="abort")
    body = json.dumps(ANSWER | {"max_tokens": 240, "n": 8}).encode()
    port = tiny_server.port
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(post_request("/v1/completions", body))
        wait_until(lambda: not is_idle(tiny_server))
    wait_until(lambda: is_idle(tiny_server))
    assert tiny_server.metric("vllm:request_success_total", finished_reason="abort") > aborted


def test_a_slow_reader_delays_nobody_and_gets_everything(tiny_server: Any) -> None:
    body = ANSWER | {"n": 32, "stream": True, "max_tokens": 100, "logprobs": 5}
    whole = tiny_server.http.post("/v1/completions", json=body | {"stream": False}).json()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", tiny_server.port))
        connection.sendall(post_request("/v1/completions", json.dumps(body).encode()))
        wait_until(lambda: not is_idle(tiny_server))
        neighbour = add_up(stream(tiny_server, ANSWER))
        wait_until(lambda: tiny_server.metric("vllm:num_requests_running") == 0)
        connection.settimeout(30)
        text = read_all(connection)
    assert len(neighbour[1]) == ANSWER["max_tokens"]
    choices = [
        choice
        for line in text.splitlines()
        if line.startswith("data: {")
        for choice in json.loads(line.removeprefix("data: "))["choices"]
    ]
    texts = [""] * 32
    for choice in choices:
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


def post_request(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def read_all(connection: socket.socket) -> str:
    """The body of a chunked response, put together."""
    pieces = []
    while piece := connection.recv(65536):
        pieces.append(piece)
    rest = b"".join(pieces).partition(b"\r\n\r\n")[2]
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body.decode()


def test_when_the_engine_dies_streams_say_so_and_health_turns_503(start_server: Any) -> None:
    server = start_server()
    engine = server.server.service.model().engine
    body = ANSWER | {"stream": True, "n": 64, "max_tokens": 240}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        engine._submit(lambda: 1 // 0)  # a bug, as the engine's thread would meet one
        *_, error, done = lines
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_stopped"
    assert server.http.get("/health").status_code == 503
    refused = server.http.post("/v1/completions", json=ANSWER)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "failed")
    assert server.http.get("/metrics").status_code == 200
