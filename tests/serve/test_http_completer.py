"""evaluate.HttpCompleter against a real server: here, as evaluate lies below the server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.errors import ConfigError, RequestError
from lockstep.core.sampling import SamplingParams
from lockstep.engine.completer import EngineCompleter
from lockstep.engine.config import EngineConfig
from lockstep.engine.engine import Engine
from lockstep.evaluate.http_completer import HttpCompleter, RemoteChat
from lockstep.evaluate.http_transport import Transport
from lockstep.models import load_model

PARAMS = SamplingParams(max_tokens=6, seed=5, ignore_eos=True, logprobs=2, n=2)


@pytest.fixture(scope="module")
def completer(tiny_server: Any) -> HttpCompleter:
    return HttpCompleter(tiny_server.url)


@pytest.fixture(scope="module")
def plain(tiny_server: Any) -> HttpCompleter:
    """As if the server knew OpenAI's API only: its card says nothing of `max_model_len`."""
    completer = HttpCompleter(f"{tiny_server.url}/v1")
    completer.__dict__["_card"] = {"id": "tiny"}
    return completer


def test_it_serves_the_first_model_or_the_one_asked_for(tiny_server: Any) -> None:
    assert HttpCompleter(tiny_server.url).model_name == "tiny"
    assert HttpCompleter(tiny_server.url, model="also-tiny").model_name == "also-tiny"
    with pytest.raises(ConfigError, match="tiny"):
        _ = HttpCompleter(tiny_server.url, model="other").model_name


def test_completions_hold_all_that_the_engine_gives(completer: HttpCompleter) -> None:
    prompts = ["the thing", [5, 6, 7]]
    finished: list[int] = []
    results = completer.complete(prompts, PARAMS, on_finish=finished.append)
    assert sorted(finished) == [0, 1]
    assert results[1].prompt_token_ids == (5, 6, 7)
    for result in results:
        assert [sample.index for sample in result.samples] == [0, 1]
        for sample in result.samples:
            assert len(sample.token_ids) == len(sample.logprobs) == 6
            assert sample.finish_reason == "length"
            for token, entry in zip(sample.token_ids, sample.logprobs, strict=True):
                assert entry.token_id == token
                assert entry.sampling_logprob == entry.logprob
                assert len(entry.top) >= 2
                assert entry.top[0][1] >= entry.logprob


def test_it_gives_the_bits_of_the_engine_in_process(
    completer: HttpCompleter, tiny_model: Path
) -> None:
    loaded = load_model(tiny_model, precision="fp32", quiet=True)
    engine = Engine(loaded.model, loaded.tokenizer, EngineConfig(kv_cache_tokens=4096))
    local = EngineCompleter(engine, model_name="tiny")
    prompts = ["the thing", [5, 6, 7], completer.chat_prompt([{"role": "user", "content": "a"}])]
    params = replace(PARAMS, temperature=0.8, top_p=0.9, prompt_logprobs=0)
    for got, expected in zip(
        completer.complete(prompts, params), local.complete(prompts, params), strict=True
    ):
        assert got.prompt_token_ids == expected.prompt_token_ids
        assert [e and e.logprob for e in got.prompt_logprobs or ()] == [
            e and e.logprob for e in expected.prompt_logprobs or ()
        ]
        for sample, same in zip(got.samples, expected.samples, strict=True):
            assert (sample.text, sample.token_ids, sample.seed) == (
                same.text,
                same.token_ids,
                same.seed,
            )
            assert [(e.logprob, e.sampling_logprob) for e in sample.logprobs] == [
                (e.logprob, e.sampling_logprob) for e in same.logprobs
            ]
    pairs = [("the", " thing"), ([5, 6], "in all")]
    assert completer.score(pairs) == local.score(pairs)


def test_the_seed_of_each_sample_draws_it_again_alone(completer: HttpCompleter) -> None:
    (result,) = completer.complete(["the thing"], PARAMS)
    for sample in result.samples:
        alone = replace(PARAMS, n=1, seed=sample.seed)
        (again,) = completer.complete(["the thing"], alone)
        assert again.samples[0].token_ids == sample.token_ids
        assert again.samples[0].logprobs == sample.logprobs


def test_the_model_defaults_of_a_server_do_not_leak_in(completer: HttpCompleter) -> None:
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    (once,) = completer.complete(["in"], greedy)
    (twice,) = completer.complete(["in"], [greedy])
    assert once.samples[0].token_ids == twice.samples[0].token_ids


def test_prompt_logprobs(completer: HttpCompleter) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    (result,) = completer.complete([[5, 6, 7]], params)
    assert result.prompt_logprobs is not None
    first, *others = result.prompt_logprobs
    assert first is None
    assert [entry and entry.token_id for entry in others] == [6, 7]


def test_a_chat_prompt_is_token_ids(completer: HttpCompleter) -> None:
    prompt = completer.chat_prompt([{"role": "user", "content": "a"}])
    assert not isinstance(prompt, str)
    (result,) = completer.complete([prompt], PARAMS)
    assert result.prompt_token_ids == tuple(prompt)


def test_scores_are_the_prompt_logprobs(completer: HttpCompleter, plain: HttpCompleter) -> None:
    pairs = [("the", " thing"), ("in", " an all")]
    scores = completer.score(pairs)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    results = completer.complete([prompt + text for prompt, text in pairs], params)
    for (prompt, _), values, result in zip(pairs, scores, results, strict=True):
        (context,) = completer.complete([prompt], params)
        expected = (result.prompt_logprobs or ())[len(context.prompt_token_ids) :]
        assert values == [entry and entry.logprob for entry in expected]
    assert plain.score(pairs) == scores


def test_a_token_prompt_is_scored_too(completer: HttpCompleter) -> None:
    prompt = completer.chat_prompt([{"role": "user", "content": "a"}])
    (values,) = completer.score([(prompt, "the")])
    assert len(values) == 1
    assert values[0] < 0


def test_a_plain_server_gives_text_and_takes_messages(
    completer: HttpCompleter, plain: HttpCompleter
) -> None:
    messages = [{"role": "user", "content": "a"}]
    params = SamplingParams(max_tokens=6, seed=5)
    chat = plain.chat_prompt(messages)
    assert isinstance(chat, RemoteChat)
    (remote,) = plain.complete([chat], params)
    (local,) = completer.complete([completer.chat_prompt(messages)], params)
    assert remote.samples[0].text == local.samples[0].text
    assert remote.samples[0].token_ids == ()
    with pytest.raises(ConfigError, match="ignore_eos"):
        plain.complete(["a"], PARAMS)


def test_a_refusal_names_the_field(completer: HttpCompleter) -> None:
    with pytest.raises(RequestError, match="256") as caught:
        completer.complete(["a"], SamplingParams(max_tokens=10_000))
    assert caught.value.param == "max_tokens"


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="URL"):
        Transport("ftp://x", api_key=None, timeout_s=1.0)
