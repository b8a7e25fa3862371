"""Streams, cancellation, failure and shutdown of the engine's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing

import pytest

from lockstep.core.errors import CapacityError, RequestError
from lockstep.core.records import SampleDelta
from lockstep.core.sampling import SamplingParams
from lockstep.engine import AsyncEngine, EngineConfig, EngineStoppedError, Request
from lockstep.engine.collector import CompletionCollector

AsyncEngineOf = Callable[..., AsyncEngine]
LONG = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def async_engine_of(model, tokenizer) -> Iterator[AsyncEngineOf]:
    engines: list[AsyncEngine] = []

    def build(**config) -> AsyncEngine:
        engines.append(
            AsyncEngine(model, tokenizer, EngineConfig(**{"kv_cache_tokens": 1024, **config}))
        )
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.fixture
def async_engine(async_engine_of) -> AsyncEngine:
    return async_engine_of()


def request(prompt=(1, 2, 3), request_id="r", **params) -> Request:
    return Request(request_id=request_id, prompt_token_ids=prompt, params=SamplingParams(**params))


async def collect(engine: AsyncEngine, asked: Request) -> list[SampleDelta]:
    return [delta async for delta in engine.generate(asked)]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not come true within 5 s")


def test_streamed_deltas_concatenate_to_the_unstreamed_completion(async_engine, engine):
    requests = [
        request(range(10, 10 + i), str(i), max_tokens=9, n=2, seed=i, logprobs=1, stop=("e",))
        for i in range(1, 6)
    ]

    async def run():
        return await asyncio.gather(*(collect(async_engine, r) for r in requests))

    for asked, deltas in zip(requests, asyncio.run(run()), strict=True):
        collector = CompletionCollector(asked)
        assert [collector.push(delta) for delta in deltas][-1]
        (whole,) = engine.run([asked])
        assert collector.completion(0).samples == whole.samples
        assert all(len(delta.token_ids) == 1 for delta in deltas)


@pytest.mark.parametrize(
    ("bad", "error"),
    [(request(prompt=(999,)), RequestError), (request(prompt=(1,) * 30, **LONG), CapacityError)],
)
def test_a_bad_request_fails_alone(async_engine_of, bad, error):
    engine = async_engine_of(kv_cache_tokens=128)

    async def run():
        good = asyncio.create_task(collect(engine, request(request_id="good", max_tokens=5)))
        with pytest.raises(error):
            await collect(engine, bad)
        return await good

    assert len(asyncio.run(run())) == 5
    assert engine.is_alive


def test_an_id_that_is_running_cannot_be_used_again_until_it_is_done(async_engine):
    async def run():
        async with aclosing(async_engine.generate(request(**LONG))) as stream:
            await anext(stream)
            with pytest.raises(RequestError, match="'r' is already running"):
                await collect(async_engine, request())
        await until(lambda: async_engine.stats().num_running == 0)
        return await collect(async_engine, request(max_tokens=2))

    assert len(asyncio.run(run())) == 2


def test_closing_the_stream_aborts_the_request(async_engine):
    async def run():
        async with aclosing(async_engine.generate(request(**LONG))) as stream:
            await anext(stream)
        await until(lambda: async_engine.stats().num_aborted == 1)

    asyncio.run(run())
    assert async_engine.stats().kv_usage == 0.0


def test_cancelling_the_task_aborts_the_request(async_engine):
    async def run():
        task = asyncio.create_task(collect(async_engine, request(n=3, **LONG)))
        await until(lambda: async_engine.stats().num_running == 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: async_engine.stats().num_aborted == 3)

    asyncio.run(run())


def test_abort_from_outside_ends_the_stream_with_its_reason(async_engine):
    async def run():
        stream = async_engine.generate(request(**LONG))
        await anext(stream)
        async_engine.abort("r")
        return [delta async for delta in stream][-1]

    assert asyncio.run(run()).finish_reason == "abort"


def test_a_failure_of_the_engine_reaches_every_stream(async_engine, model, monkeypatch):
    async def run():
        streams = [async_engine.generate(request(request_id=name, **LONG)) for name in "ab"]
        for stream in streams:
            await anext(stream)
        monkeypatch.setattr(model, "rotary", None)  # every step uses it, captured or not
        for stream in streams:
            with pytest.raises(EngineStoppedError, match="the engine failed: AttributeError"):
                async for _ in stream:
                    pass
        with pytest.raises(EngineStoppedError):
            await collect(async_engine, request())

    asyncio.run(run())
    assert not async_engine.is_alive


def test_closing_the_engine_fails_what_still_runs_and_what_comes_after(async_engine):
    async def run():
        stream = async_engine.generate(request(**LONG))
        await anext(stream)
        await asyncio.to_thread(async_engine.close)
        with pytest.raises(EngineStoppedError, match="the engine was closed"):
            async for _ in stream:
                pass
        with pytest.raises(EngineStoppedError, match="the engine was closed"):
            await collect(async_engine, request())

    asyncio.run(run())
    async_engine.close()


def test_new_weights_take_effect_between_steps(async_engine):
    async def run():
        async_engine.weights_updated(3)
        await until(lambda: async_engine.weight_version == 3)

    asyncio.run(run())


def test_an_idle_engine_uses_no_cpu(async_engine):
    asyncio.run(collect(async_engine, request(max_tokens=2)))
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05
