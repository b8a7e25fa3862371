"""`lockstep serve` as a process: loading, readiness, draining, and mistakes in one sentence."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import httpx
import pytest

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "lockstep.cli", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"LOCKSTEP_API_KEY": ""},
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def url_when_ready(process: subprocess.Popen[str]) -> str:
    line = next_line(process.stdout)
    assert line.startswith("ready: "), line
    return line.split()[-1].removesuffix("/v1")


def next_line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


def test_it_says_when_it_is_ready_and_drains_on_sigterm(start: Start, tiny_model: Path) -> None:
    process = start(str(tiny_model), "--port", "0", "--precision", "fp32", "--threads", "1")
    url = url_when_ready(process)
    assert next_line(process.stdout).startswith("try: curl ")
    assert httpx.get(f"{url}/health").status_code == 200
    body = {"prompt": "the thing", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        first = next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    finish = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in [first, *rest[:-1]]]
    assert finish[-1] == "length"
    assert process.wait(30) == 0


def test_a_repeated_sigterm_is_no_error(start: Start, tiny_model: Path) -> None:
    process = start(str(tiny_model), "--port", "0", "--threads", "1")
    url_when_ready(process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_a_second_interrupt_ends_it_at_once(start: Start, tiny_model: Path) -> None:
    process = start(str(tiny_model), "--port", "0", "--drain-seconds", "60", "--threads", "1")
    url = url_when_ready(process)
    body = {"prompt": ["the thing"] * 64, "max_tokens": 240, "n": 16, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60
    ) as response:
        next(response.iter_lines())
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            time.sleep(0.05)
            process.send_signal(signal.SIGINT)
    assert process.returncode == 130


def test_requests_past_the_drain_deadline_are_cut(start: Start, tiny_model: Path) -> None:
    process = start(str(tiny_model), "--port", "0", "--drain-seconds", "1", "--threads", "1")
    url = url_when_ready(process)
    body = {"prompt": ["the thing"] * 64, "max_tokens": 240, "n": 16, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60
    ) as response:
        next(response.iter_lines())
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_a_port_in_use_is_one_sentence(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start("anything", "--port", str(port))
        output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (2, "")
    assert errors == (
        f"lockstep: port {port} on 127.0.0.1 is in use; "
        "choose another with --port (0 takes a free one)\n"
    )


def test_a_model_that_is_not_there_is_one_sentence(start: Start, tmp_path: Path) -> None:
    process = start(str(tmp_path / "nothing"), "--port", "0")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.startswith("lockstep: ")
    assert errors.count("\n") == 1


def test_health_is_503_until_the_model_is_loaded(tiny_model: Path) -> None:
    from starlette.testclient import TestClient

    from lockstep.serve.app import build_app
    from lockstep.serve.config import HttpConfig
    from lockstep.serve.service import Service

    service = Service(HttpConfig(), names=("tiny",))
    client = TestClient(build_app(service))
    for route in ("/health", "/ping", "/v1/models"):
        response = client.get(route)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "loading"
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
    service.failure = "out of memory"
    assert "out of memory" in client.get("/health").json()["error"]["message"]
    assert client.get("/metrics").status_code == 200
