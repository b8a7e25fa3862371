"""JSON over HTTP as a long evaluation needs it: kept connections, retries, one-sentence errors.

Standard library only. A connection belongs to the thread that uses it. Proxies of the environment
are not used. 4xx is the request's fault and raises RequestError at once; overload, a server that is
starting, and a lost connection are tried again with growing pauses.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lockstep.core.errors import ConfigError, RequestError

Json = dict[str, Any]

RETRIED_STATUSES = (429, 502, 503, 504)
MAX_TRIES = 6
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class _Reply:
    status: int
    body: bytes
    retry_after_s: float | None


class Transport:
    """Calls to one server. Safe to use from many threads."""

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float) -> None:
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{base_url!r} is not an http(s) URL, such as http://127.0.0.1:8000")
        self._is_https = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._url = base_url
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._local = threading.local()

    def call(self, method: str, path: str, body: Json | None = None) -> Json:
        """The answer's JSON object; RequestError where there is none to be had."""
        data = None if body is None else json.dumps(body).encode()
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, MAX_TRIES + 1):
            try:
                reply = self._exchange(method, path, data)
            except (OSError, http.client.HTTPException) as error:
                if attempt == MAX_TRIES:
                    reason = f"{type(error).__name__}: {error}"
                    raise RequestError(f"no answer from {self._url}{path} ({reason})") from error
                wait_s = pause_s
            else:
                if reply.status not in RETRIED_STATUSES or attempt == MAX_TRIES:
                    return self._read(path, reply)
                wait_s = reply.retry_after_s or pause_s
            time.sleep(min(wait_s, MAX_PAUSE_S))
            pause_s *= 2
        raise AssertionError("the last try returns or raises")

    def _exchange(self, method: str, path: str, data: bytes | None) -> _Reply:
        connection = self._connection()
        is_kept = False
        try:
            connection.request(method, self._path + path, body=data, headers=self._headers)
            response = connection.getresponse()
            body = response.read()
            is_kept = not response.will_close
        finally:
            if not is_kept:
                connection.close()  # the next request opens it anew
        retry_after = response.headers.get("Retry-After")
        with contextlib.suppress(TypeError, ValueError):
            return _Reply(status=response.status, body=body, retry_after_s=float(retry_after or ""))
        return _Reply(status=response.status, body=body, retry_after_s=None)

    def _connection(self) -> http.client.HTTPConnection:
        if not hasattr(self._local, "connection"):
            kind = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
            self._local.connection = kind(self._host, self._port, timeout=self._timeout_s)
        connection: http.client.HTTPConnection = self._local.connection
        return connection

    def _read(self, path: str, reply: _Reply) -> Json:
        try:
            value = json.loads(reply.body)
        except ValueError:
            value = None
        if reply.status < 400 and isinstance(value, dict):
            return value
        error = value.get("error", value) if isinstance(value, dict) else None
        fields = error if isinstance(error, dict) else {}
        reason = fields.get("message") or reply.body[:200].decode(errors="replace")
        raise RequestError(
            f"{self._url}{path} answered {reply.status}: {reason}",
            param=fields.get("param"),
            code=fields.get("code"),
        )
