"""Answers that notice when the client has gone: server-sent events, and plain work.

Both watch for the disconnect while the work is under way and cancel it at once, which aborts the
engine request: a client that vanishes stops costing within one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lockstep.core.errors import LockstepError
from lockstep.serve.errors import ApiError, as_api_error

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event; JSON has no raw newlines, so one `data:` line always does."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f"data: {text}\n\n".encode()


class EventStream(Response):
    """Streams events made by `events`; an error in mid-stream becomes the last event but [DONE]."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # Response sets the length of its empty body; a stream has none.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            await unless_disconnected(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except (ApiError, LockstepError) as error:
                shown = error if isinstance(error, ApiError) else as_api_error(error)
                body = event(shown.body()) + DONE
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, cancelled with ClientDisconnect raised if the client goes first.

    The request's body must have been read: from then on the only message to come is the disconnect.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        await _cancel(task)
        await _cancel(watch)


async def run_for(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    return await unless_disconnected(request.receive, work)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    """End it and wait until it has cleaned up; its outcome no longer matters."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it
