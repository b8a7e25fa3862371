"""Whole requests through the synchronous engine. Bitwise contracts are in tests/contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.core.errors import CapacityError, ConfigError, RequestError
from lockstep.core.records import Completion, SampleDelta
from lockstep.core.sampling import SamplingParams
from lockstep.engine import Engine, EngineConfig, Request, sample_seed
from lockstep.engine.collector import CompletionCollector
from lockstep.models import Llama, PackedAttention

PROMPTS = ["hello", "hello world", "a", "the quick brown fox jumps over the lazy dog"]

PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 12), "seed": st.integers(0, 9)},
    optional={
        "temperature": st.sampled_from([0.0, 0.8]),
        "n": st.integers(1, 3),
        "top_p": st.just(0.9),
        "frequency_penalty": st.just(0.5),
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.integers(0, 2),
        "stop": st.just(("e", "th")),
    },
)


def request(engine: Engine, prompt, request_id="r", priority=0, **params) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=engine.encode(prompt),
        params=SamplingParams(**params),
        priority=priority,
    )


def run_all(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    collectors = {r.request_id: CompletionCollector(r) for r in requests}
    for r in requests:
        engine.add_request(r)
    while engine.has_work:
        for delta in engine.step():
            collectors[delta.request_id].push(delta)
    return {name: collector.completion(0) for name, collector in collectors.items()}


def result(completion: Completion) -> tuple:
    """All of a completion but what depends on the cache's state and the request's name."""
    return completion.prompt_token_ids, completion.samples, completion.prompt_logprobs


@given(specs=st.lists(st.tuples(st.sampled_from(PROMPTS), PARAMS), min_size=2, max_size=5))
@settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_request_is_answered_the_same_alone_and_in_a_crowd(engine_of, specs):
    crowd = engine_of(kv_cache_tokens=512, max_batch_tokens=40, max_chunk_tokens=16)
    alone = engine_of()
    together = run_all(
        crowd,
        [
            request(crowd, prompt, request_id=str(i), priority=i % 2, **params)
            for i, (prompt, params) in enumerate(specs)
        ],
    )
    for i, (prompt, params) in enumerate(specs):
        (single,) = alone.generate([prompt], SamplingParams(**params))
        assert result(together[str(i)]) == result(single)


def test_the_trainers_forward_gives_the_same_logprobs(engine, model):
    (completion,) = engine.generate(["hello"], SamplingParams(max_tokens=20, seed=1))
    (sample,) = completion.samples
    tokens_T = torch.tensor([*completion.prompt_token_ids, *sample.token_ids])
    attention = PackedAttention.from_lengths([len(tokens_T)])
    with torch.no_grad():
        hidden_TD = model(tokens_T, attention.positions(), attention)
        logprobs = model.token_logprobs(hidden_TD[:-1], tokens_T[1:])
    got = [token.logprob for token in sample.logprobs]
    assert got == pytest.approx(logprobs[-len(got) :].tolist(), abs=1e-4)


def test_text_is_the_decoded_tokens_without_the_end_token(engine, tokenizer):
    completions = engine.generate(PROMPTS, SamplingParams(max_tokens=30, seed=2))
    for completion in completions:
        (sample,) = completion.samples
        assert sample.text == tokenizer.decode(sample.token_ids, is_continuation=True)


def test_samples_of_a_request_are_those_of_single_requests_with_their_seeds(engine):
    (completion,) = engine.generate(["hello"], SamplingParams(max_tokens=8, n=3, seed=7))
    assert [sample.seed for sample in completion.samples] == [sample_seed(7, i) for i in range(3)]
    assert len({sample.token_ids for sample in completion.samples}) == 3
    for sample in completion.samples:
        (single,) = engine.generate(["hello"], SamplingParams(max_tokens=8, seed=sample.seed))
        assert single.samples[0].token_ids == sample.token_ids


def test_a_fresh_seed_is_reported_and_gives_the_answer_again(engine):
    (first,) = engine.generate(["hello"], SamplingParams(max_tokens=8))
    (second,) = engine.generate(["hello"], SamplingParams(max_tokens=8))
    assert first.samples[0].seed != second.samples[0].seed
    (again,) = engine.generate(["hello"], SamplingParams(max_tokens=8, seed=first.samples[0].seed))
    assert again.samples == first.samples


def test_a_prompt_is_computed_once_for_all_samples_and_later_requests(engine):
    prompt = "x" * 40
    (completion,) = engine.generate([prompt], SamplingParams(max_tokens=2, n=4))
    stats = engine.stats()
    assert completion.num_cached_tokens == 0
    assert stats.prefix_hits == 3 * 32
    (later,) = engine.generate([prompt], SamplingParams(max_tokens=2))
    assert later.num_cached_tokens == 32


def test_finish_reasons(engine, tokenizer):
    end = tokenizer.vocab_size - 1
    (stopped,) = engine.generate(["a"], SamplingParams(logit_bias={end: 100.0}))
    assert (stopped.samples[0].finish_reason, stopped.samples[0].token_ids) == ("stop", (end,))
    (held_off,) = engine.generate(["a"], SamplingParams(logit_bias={end: 100.0}, min_tokens=3))
    assert len(held_off.samples[0].token_ids) == 4
    assert end not in held_off.samples[0].token_ids[:3]
    (ignored,) = engine.generate(
        ["a"], SamplingParams(logit_bias={end: 100.0}, ignore_eos=True, max_tokens=3)
    )
    assert ignored.samples[0].finish_reason == "length"
    assert ignored.samples[0].token_ids == (end, end, end)


def test_generation_ends_with_length_where_the_model_ends(engine_of):
    engine = engine_of(max_model_len=20)
    (completion,) = engine.generate(["a" * 17], SamplingParams(max_tokens=99, ignore_eos=True))
    assert len(completion.samples[0].token_ids) == 3
    assert completion.samples[0].finish_reason == "length"


def test_max_tokens_zero_gives_prompt_logprobs_only(engine):
    (completion,) = engine.generate(["hello"], SamplingParams(max_tokens=0, prompt_logprobs=0))
    (sample,) = completion.samples
    assert (sample.text, sample.token_ids, sample.finish_reason) == ("", (), "length")
    assert completion.prompt_logprobs[0] is None
    assert [entry.token_id for entry in completion.prompt_logprobs[1:]] == list(
        completion.prompt_token_ids[1:]
    )


def test_prompt_logprobs_are_the_same_however_the_prompt_is_cut_and_cached(engine_of):
    params = SamplingParams(max_tokens=1, prompt_logprobs=2, temperature=0.0)
    plain = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    prompt = "the quick brown fox jumps over the lazy dog"
    (whole,) = engine_of().generate([prompt], params)
    for chunk in (1, 7, 16):
        engine = engine_of(max_chunk_tokens=chunk)
        engine.generate([prompt], SamplingParams(max_tokens=1))
        (cut,) = engine.generate([prompt], params)
        assert cut.prompt_logprobs == whole.prompt_logprobs
        (without_alternatives,) = engine.generate([prompt], plain)
        assert [entry and entry.logprob for entry in without_alternatives.prompt_logprobs] == [
            entry and entry.logprob for entry in whole.prompt_logprobs
        ]


def test_preemption_changes_nothing_but_the_count(engine_of):
    small = engine_of(kv_cache_tokens=128, max_num_seqs=6)
    params = [SamplingParams(max_tokens=60, seed=i, ignore_eos=True) for i in range(4)]
    crowded = small.generate(["abcdefgh"] * 4, params)
    assert small.stats().num_preemptions > 0
    roomy = engine_of().generate(["abcdefgh"] * 4, params)
    assert [c.samples for c in crowded] == [c.samples for c in roomy]


def test_a_bad_request_is_refused_and_harms_nobody(engine):
    engine.add_request(request(engine, "hello", max_tokens=4, seed=1))
    with pytest.raises(RequestError, match="token id 5000"):
        engine.add_request(request(engine, [5000], request_id="bad"))
    with pytest.raises(RequestError, match="'r' is already running"):
        engine.add_request(request(engine, "x"))
    tokens = [t for _ in range(4) for delta in engine.step() for t in delta.token_ids]
    assert not engine.has_work
    (single,) = engine.generate(["hello"], SamplingParams(max_tokens=4, seed=1))
    assert tuple(tokens) == single.samples[0].token_ids


def test_a_request_that_the_cache_can_never_hold_is_refused(engine_of):
    engine = engine_of(kv_cache_tokens=32)
    with pytest.raises(CapacityError, match=r"max_tokens=30 need a KV cache of 34 tokens.*has 32"):
        engine.generate(["hello"], SamplingParams(max_tokens=30))
    assert not engine.has_work
    assert engine.stats().kv_usage == 0.0


def test_abort_ends_all_samples_and_frees_their_blocks(engine):
    engine.add_request(request(engine, "hello", n=2, max_tokens=50, ignore_eos=True))
    engine.add_request(request(engine, "other", request_id="o", max_tokens=3))
    engine.step()
    engine.abort("r")
    engine.abort("unknown")
    deltas: list[SampleDelta] = []
    while engine.has_work:
        deltas += engine.step()
    aborted = [d.index for d in deltas if d.finish_reason == "abort"]
    assert sorted(aborted) == [0, 1]
    assert engine.stats().kv_usage == 0.0
    assert engine.stats().num_aborted == 2


def test_new_weights_are_used_at_once_and_nothing_old_is_kept(engine_of, model):
    engine = engine_of()
    params = SamplingParams(max_tokens=6, seed=1)
    prompt = "y" * 40
    (before,) = engine.generate([prompt], params)
    weight = model.model.layers[0].mlp.up_proj.weight
    saved = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(1.5)
        engine.weights_updated(1)
        (after,) = engine.generate([prompt], params)
        (fresh,) = engine_of().generate([prompt], params)
    finally:
        with torch.no_grad():
            weight.copy_(saved)
    assert (after.weight_version, after.num_cached_tokens) == (1, 0)
    assert after.samples == fresh.samples
    assert after.samples != before.samples


def test_on_finish_tells_each_prompt_once(engine):
    done: list[int] = []
    engine.generate(PROMPTS, SamplingParams(max_tokens=3, n=2), on_finish=done.append)
    assert sorted(done) == [0, 1, 2, 3]


def test_without_a_tokenizer_prompts_are_token_ids(engine_of):
    engine = engine_of(with_tokenizer=False)
    (completion,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert completion.samples[0].text == ""
    with pytest.raises(RequestError, match="needs a tokenizer"):
        engine.generate(["text"], SamplingParams())


def test_stats_add_up(engine):
    engine.generate(["hello", "abc"], SamplingParams(max_tokens=3, n=2, ignore_eos=True))
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.num_finished) == (8, 12, 4)
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    assert min(stats.queue_s, stats.prefill_s, stats.decode_s) > 0.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kv_cache_tokens": 0}, "kv_cache_tokens must be at least 1, got 0"),
        ({"kv_cache_tokens": 1, "kv_cache_bytes": 1}, "exclude each other"),
        ({"max_model_len": 999}, "999, but the model was made for 256"),
        ({"kv_cache_bytes": 1}, "kv_cache_bytes is 1, but one block"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
    ],
)
def test_a_bad_config_is_refused(model, config, message):
    with pytest.raises(ConfigError, match=message):
        Engine(model, None, EngineConfig(**config))


def test_logits_that_are_not_numbers_end_their_request_alone(model, tokenizer, caplog):
    """A token's embedding is NaN: a prompt that ends with it fails, nobody else does."""
    broken_model = Llama(replace(model.config, tie_embeddings=False))
    broken_model.initialise(seed=4)
    with torch.no_grad():
        broken_model.model.embed_tokens.weight[250] = float("nan")
    engine = Engine(broken_model, tokenizer, EngineConfig(kv_cache_tokens=1024))
    params = SamplingParams(max_tokens=5, seed=1, temperature=0.0, logit_bias={250: -100.0})
    plain = replace(params, logit_bias={}, stop_token_ids=(250,))
    for each in (params, plain, plain, plain):
        (expected,) = engine.generate([[3, 4, 5]], each)
        first, failed, last = engine.generate([[3, 4, 5], [3, 5, 250], [3, 4, 5]], each)
        (sample,) = failed.samples
        assert sample.finish_reason == "error"
        assert sample.stop_reason == "the model's logits at position 3 are not finite numbers"
        assert sample.token_ids == ()
        assert first.samples == last.samples == expected.samples
    assert "request generate" in caplog.text
    assert engine.stats().kv_usage == 0.0
