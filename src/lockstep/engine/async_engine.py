"""An engine for asyncio: requests as async generators, the step loop in a thread of its own.

The event loop and the engine's thread share a queue of commands one way and one callback a step the
other way; the engine itself is touched by its thread only. While there is no work the thread
sleeps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from lockstep.core.errors import LockstepError, RequestError
from lockstep.core.records import SampleDelta
from lockstep.engine.config import EngineConfig
from lockstep.engine.engine import Engine
from lockstep.engine.request import Request
from lockstep.engine.stats import EngineStats
from lockstep.models.llama import Llama
from lockstep.text.tokenizer import Tokenizer

logger = logging.getLogger("lockstep.engine")

Event = SampleDelta | BaseException


class EngineStoppedError(RuntimeError):
    """The engine's thread has ended, by `close` or by a bug; its requests cannot be answered."""


@dataclass(eq=False)
class _Stream:
    """One request's way back to the event loop that asked."""

    request: Request
    loop: asyncio.AbstractEventLoop
    num_open: int
    """Samples whose last delta was not handed out yet; counted by the engine's thread."""
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)


class AsyncEngine:
    """Starts its thread at once; `close` ends it."""

    def __init__(
        self, model: Llama, tokenizer: Tokenizer | None, config: EngineConfig | None = None
    ) -> None:
        self._engine = Engine(model, tokenizer, config)
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._streams: dict[str, _Stream] = {}
        self._failure: str | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._loop, name="lockstep-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests can be answered."""
        return self._failure is None

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def generate(self, request: Request) -> AsyncGenerator[SampleDelta, None]:
        """Deltas of all samples as they come. The first `anext` raises RequestError or
        CapacityError if the request is invalid. Closing the generator early aborts the request
        within one step.
        """
        stream = _Stream(request, asyncio.get_running_loop(), num_open=request.params.n)
        self._submit(lambda: self._start(stream), stream)
        num_open = request.params.n
        try:
            while num_open > 0:
                event = await stream.events.get()
                if isinstance(event, BaseException):
                    num_open = 0
                    raise event
                num_open -= event.finish_reason is not None
                yield event
        finally:
            if num_open > 0 and self.is_alive:
                self._submit(lambda: self._stop(stream))

    def abort(self, request_id: str) -> None:
        """End a request from outside: its stream gets last deltas with finish reason `abort`."""
        self._submit(lambda: self._engine.abort(request_id))

    def weights_updated(self, version: int) -> None:
        """See `Engine.weights_updated`; takes effect between two steps."""
        self._submit(lambda: self._engine.weights_updated(version))

    def close(self) -> None:
        """End the thread after the step under way; requests still running fail. May be repeated."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    def _submit(self, command: Callable[[], None], stream: _Stream | None = None) -> None:
        with self._wake:
            if self._failure is not None:
                raise EngineStoppedError(self._failure)
            if stream is not None:
                request_id = stream.request.request_id
                if request_id in self._streams:
                    raise RequestError(f"request id {request_id!r} is already running")
                self._streams[request_id] = stream
            self._commands.append(command)
            self._wake.notify()

    # The engine's thread

    def _loop(self) -> None:
        failure = "the engine was closed"
        try:
            while self._wait_for_work():
                while self._commands:
                    self._commands.popleft()()
                if self._engine.has_work:
                    self._hand_out(self._engine.step())
        except BaseException as error:  # whatever it was, the streams must hear of it
            logger.exception("the engine's thread failed")
            failure = f"the engine failed: {type(error).__name__}: {error}"
        self._fail_all(failure)

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._commands or self._engine.has_work or self._is_closing):
                self._wake.wait()
            return not self._is_closing

    def _start(self, stream: _Stream) -> None:
        try:
            self._engine.add_request(stream.request)
        except LockstepError as error:
            del self._streams[stream.request.request_id]
            self._send([(stream, error)])

    def _stop(self, stream: _Stream) -> None:
        """Abort, unless the id belongs to a later request by now."""
        if self._streams.get(stream.request.request_id) is stream:
            del self._streams[stream.request.request_id]
            self._engine.abort(stream.request.request_id)

    def _hand_out(self, deltas: list[SampleDelta]) -> None:
        events: list[tuple[_Stream, Event]] = []
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue  # nobody listens any more
            events.append((stream, delta))
            stream.num_open -= delta.finish_reason is not None
            if stream.num_open == 0:
                del self._streams[delta.request_id]
        self._send(events)

    def _fail_all(self, failure: str) -> None:
        with self._wake:
            self._failure = failure
            streams, self._streams = self._streams, {}
        self._send([(stream, EngineStoppedError(failure)) for stream in streams.values()])

    @staticmethod
    def _send(events: list[tuple[_Stream, Event]]) -> None:
        """One callback for each event loop that listens."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Event]]] = {}
        for stream, event in events:
            by_loop.setdefault(stream.loop, []).append((stream, event))
        for loop, group in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, group)


def _deliver(events: list[tuple[_Stream, Event]]) -> None:
    for stream, event in events:
        stream.events.put_nowait(event)
