"""C1, C2 and C5 with keys and values in fewer bits: answers change with the format and with nothing
else.
"""

from __future__ import annotations

import pytest
import torch

from lockstep.core.errors import ConfigError
from lockstep.core.sampling import SamplingParams
from lockstep.engine import EngineConfig, Request
from lockstep.models import PackedAttention
from lockstep.train.packing import Document, pack
from lockstep.train.step import target_statistics


@pytest.fixture(params=["int8", "fp8"])
def kv_cache_dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def test_batch_chunks_prefixes_threads_and_capture_change_nothing(
    family, threads, kv_cache_dtype, shared_model, engine_of, requests_of, bits_of
):
    model, requests = shared_model(family, "bf16"), requests_of(10, seed=21)
    kept = {"kv_cache_dtype": kv_cache_dtype}
    alone = [
        bits_of(engine_of(model, capture="off", **kept).run([request])[0]) for request in requests
    ]
    for limits in (
        {},
        {"max_chunk_tokens": 7},
        {"max_num_seqs": 3, "enable_prefix_cache": False},
        {"kv_cache_tokens": 512, "max_model_len": 400},  # too few for all: preemption
    ):
        engine = engine_of(model, **kept, **limits)
        for _ in range(2):  # the second time from the prefix cache
            assert [bits_of(c) for c in engine.run(requests)] == alone
    plain = [bits_of(c) for c in engine_of(model).run(requests)]
    assert plain != alone


def test_the_trainer_rounds_keys_and_values_as_the_engine_does(
    family, threads, kv_cache_dtype, fresh_model, engine_of, requests_of
):
    model = fresh_model(family, "bf16")
    model.kv_format = kv_cache_dtype
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    requests = [
        Request(request_id=r.request_id, prompt_token_ids=r.prompt_token_ids, params=params)
        for r in requests_of(6, seed=4)
    ]
    completions = engine_of(model, max_chunk_tokens=50).run(requests)
    documents, expected = [], []
    for completion in completions:
        prompt, sample = completion.prompt_token_ids, completion.samples[0]
        documents.append(
            Document(
                token_ids=[*prompt, *sample.token_ids],
                loss_weights=[0.0] * len(prompt) + [1.0] * len(sample.token_ids),
            )
        )
        expected += [token.logprob for token in sample.logprobs]
    (micro_batch,) = pack(documents, max_tokens=sum(map(len, documents)))
    statistics = target_statistics(model, micro_batch)
    assert statistics.logprobs_T.tolist() == expected
    statistics.logprobs_T.sum().backward()
    gradient = model.model.layers[0].self_attn.k_proj.weight.grad
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0
    model.kv_format = None
    with torch.no_grad():
        assert target_statistics(model, micro_batch).logprobs_T.tolist() != expected


def test_a_scorer_may_name_the_format(shared_model, kv_cache_dtype, engine_of, requests_of):
    model = shared_model("llama", "bf16")
    (request,) = requests_of(1, seed=30)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    request = Request(request_id="0", prompt_token_ids=request.prompt_token_ids, params=params)
    (completion,) = engine_of(model, kv_cache_dtype=kv_cache_dtype).run([request])
    tokens_T = torch.tensor(completion.prompt_token_ids)
    attention = PackedAttention.from_lengths([len(tokens_T)], kv_format=kv_cache_dtype)
    with torch.no_grad():
        hidden_TD = model(tokens_T, attention.positions(), attention)
        logprobs = model.token_logprobs(hidden_TD[:-1], tokens_T[1:])
    assert [entry.logprob for entry in completion.prompt_logprobs[1:]] == logprobs.tolist()


def test_int8_and_fp8_hold_twice_the_tokens(shared_model):
    model = shared_model("llama", "bf16")
    blocks = {
        dtype: EngineConfig(kv_cache_bytes=1 << 20, kv_cache_dtype=dtype)
        .scheduler_config(model)
        .num_blocks
        for dtype in ("auto", "bf16", "int8", "fp8")
    }
    assert blocks["auto"] == blocks["bf16"]
    assert blocks["int8"] == blocks["fp8"] > 1.5 * blocks["bf16"]


def test_a_wider_cache_than_the_computation_is_refused(shared_model, engine_of):
    with pytest.raises(ConfigError, match="computes in bf16"):
        engine_of(shared_model("llama", "bf16"), kv_cache_dtype="fp32")
