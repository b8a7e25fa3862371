"""Running one HTTP request's generations and handing on what they produce.

A completion request may hold several prompts; each is one engine request with a task that pumps its
deltas into a mailbox. The mailbox joins deltas of one sample that nobody has read yet, so a slow
reader costs at most the text of its own answer, holds no KV block, and never delays the engine or a
neighbour. Leaving the context aborts whatever still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from lockstep.core.records import SampleDelta, TokenLogprob
from lockstep.engine.request import Request
from lockstep.serve.errors import unavailable

if TYPE_CHECKING:  # torch: seconds that pass in the loading thread
    from lockstep.engine.async_engine import AsyncEngine


class DeltaListener(Protocol):
    """Hears of one engine request as it happens, whether or not the client keeps up."""

    def on_delta(self, delta: SampleDelta) -> None: ...

    def on_abort(self) -> None: ...


class DeltaBuffer:
    """Deltas of one sample, joined: how they were cut does not show in the result."""

    def __init__(self) -> None:
        self._last: SampleDelta | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._num_cached_tokens = 0

    def push(self, delta: SampleDelta) -> None:
        self._last = delta
        self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)

    def joined(self) -> SampleDelta:
        """Everything pushed so far; at least one delta must have been."""
        last = self._last
        assert last is not None
        return SampleDelta(
            request_id=last.request_id,
            index=last.index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            seed=last.seed,
        )


class Generations:
    """Async context and iterator over (prompt number, delta), in order within a sample."""

    def __init__(
        self,
        engine: AsyncEngine,
        requests: Sequence[Request],
        listeners: Sequence[DeltaListener],
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._listeners = listeners
        self._tasks: list[asyncio.Task[None]] = []
        self._pending: dict[tuple[int, int], DeltaBuffer] = {}
        self._num_running = len(requests)
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Generations:
        for number in range(len(self._requests)):
            task = asyncio.create_task(self._pump(number))
            task.add_done_callback(self._on_done)
            self._tasks.append(task)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[tuple[int, SampleDelta]]:
        """Raises what the engine raised, after the deltas that came before it."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            pending, self._pending = self._pending, {}
            for (number, _), buffer in pending.items():
                yield number, buffer.joined()
            if self._error is not None:
                raise self._error
            if self._num_running == 0 and not self._pending:
                return

    async def _pump(self, number: int) -> None:
        listener = self._listeners[number]
        is_finished = False
        try:
            async with aclosing(self._engine.generate(self._requests[number])) as deltas:
                async for delta in deltas:
                    listener.on_delta(delta)
                    self._pending.setdefault((number, delta.index), DeltaBuffer()).push(delta)
                    self._changed.set()
            is_finished = True
        finally:
            if not is_finished:
                listener.on_abort()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._engine.is_alive:
            error = unavailable(f"{error}; the answer cannot be completed", code="engine_stopped")
        self._error = self._error or error
        self._num_running -= 1
        self._changed.set()
