"""One chat question over HTTP, answered as it is written; server-sent events, stdlib only.

It asks for logprobs and token ids, so that what came over the wire can be computed again.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lockstep.core.errors import RequestError

TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class StreamedAnswer:
    """An answer as it came, and when."""

    text: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    first_token_s: float
    """From sending the request to the first token of the answer."""
    total_s: float


def stream_chat(
    url: str, question: str, *, max_tokens: int, on_text: Callable[[str], None]
) -> StreamedAnswer:
    """Ask greedily; `on_text` hears each piece as it arrives."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    text, reason = "", ""
    prompt: list[int] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    started_s = time.perf_counter()
    first_token_s = 0.0
    for event in _events(url, body):
        prompt = event.get("prompt_token_ids") or prompt
        (choice,) = event["choices"]
        if choice.get("token_ids"):
            first_token_s = first_token_s or time.perf_counter() - started_s
            tokens += choice["token_ids"]
            logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
        if piece := choice["delta"].get("content"):
            text += piece
            on_text(piece)
        reason = choice["finish_reason"] or reason
    return StreamedAnswer(
        text=text,
        prompt_token_ids=tuple(prompt),
        token_ids=tuple(tokens),
        logprobs=tuple(logprobs),
        finish_reason=reason,
        first_token_s=first_token_s,
        total_s=time.perf_counter() - started_s,
    )


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON of each event until `[DONE]`; RequestError for an answer that is none."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    try:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            reason = response.read(500).decode(errors="replace")
            raise RequestError(f"{url} answered {response.status}: {reason}")
        for line in response:
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise RequestError(f"{url} broke off: {event['error']['message']}")
            yield event
        raise RequestError(f"{url} ended the stream without [DONE]")
    finally:
        connection.close()
