"""C2: chunk size, prefix cache, preemption, aborts and priorities change no bit."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from lockstep.core.sampling import SamplingParams
from lockstep.engine import Request
from lockstep.engine.collector import CompletionCollector

NUM_REQUESTS = 8


@pytest.fixture
def model(shared_model, family, precision):
    return shared_model(family, precision)


@pytest.fixture(scope="module")
def requests(requests_of):
    return requests_of(NUM_REQUESTS, seed=2)


@pytest.fixture(scope="module")
def answers_whole(shared_model, requests, answers_of):
    """By model; computed once."""

    @cache
    def answers(family: str, precision: str):
        model = shared_model(family, precision)
        config = {"max_batch_tokens": 4096, "enable_prefix_cache": False}
        return [answers_of(model, [request], **config)[0] for request in requests]

    return answers


@pytest.fixture
def whole(answers_whole, family, precision):
    """The answers to each request alone, its prompt computed at once, without a prefix cache."""
    return answers_whole(family, precision)


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunk_size_changes_nothing(model, requests, whole, answers_of, chunk):
    config = {"max_chunk_tokens": chunk, "max_batch_tokens": 1024, "enable_prefix_cache": False}
    assert answers_of(model, requests, **config) == whole


def test_the_step_budget_changes_nothing(model, requests, whole, answers_of):
    assert answers_of(model, requests, max_batch_tokens=20) == whole


def test_prefix_hits_change_nothing(model, requests, whole, engine_of, bits_of):
    """Other continuations of the same prompts go first and leave every prefix in the cache."""
    engine = engine_of(model)
    longer = [
        Request(
            request_id=f"warm {request.request_id}",
            prompt_token_ids=[*request.prompt_token_ids, 1, 2, 3],
            params=SamplingParams(max_tokens=2),
        )
        for request in requests
    ]
    engine.run(longer)
    warm = engine.run(requests)
    assert engine.stats().prefix_hits > 0
    assert [bits_of(completion) for completion in warm] == whole


def test_samples_that_share_a_prompt_are_those_that_compute_it(model, requests, answers_of):
    shared = [dataclasses.replace(r, params=dataclasses.replace(r.params, n=3)) for r in requests]
    without_cache = answers_of(model, shared, enable_prefix_cache=False)
    assert answers_of(model, shared) == without_cache


def test_preemption_changes_nothing(model, requests_of, answers_of, engine_of, bits_of):
    requests = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, max_tokens=40))
        for r in requests_of(NUM_REQUESTS, seed=3, longest=60)
    ]
    alone = [answers_of(model, [request])[0] for request in requests]
    engine = engine_of(model, kv_cache_tokens=208)
    crowded = engine.run(requests)
    assert engine.stats().num_preemptions > 0
    assert [bits_of(completion) for completion in crowded] == alone


def test_aborts_of_others_change_nothing(model, requests, whole, engine_of, bits_of):
    engine = engine_of(model, max_batch_tokens=256)
    kept = {request.request_id: CompletionCollector(request) for request in requests[::2]}
    for request in requests:
        engine.add_request(request)
    num_steps = 0
    while engine.has_work:
        for delta in engine.step():
            if delta.request_id in kept:
                kept[delta.request_id].push(delta)
        num_steps += 1
        if num_steps <= NUM_REQUESTS // 2:
            engine.abort(requests[2 * num_steps - 1].request_id)
    answers = [bits_of(collector.completion(0)) for collector in kept.values()]
    assert answers == whole[::2]


def test_priorities_and_order_change_nothing(model, requests, whole, answers_of):
    backwards = [
        dataclasses.replace(request, priority=-number) for number, request in enumerate(requests)
    ][::-1]
    answers = answers_of(model, backwards, max_batch_tokens=64, max_num_seqs=3)
    assert answers[::-1] == whole
