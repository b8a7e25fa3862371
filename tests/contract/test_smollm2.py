"""The contract on the real model, at sizes where ordinary kernels lose it (K 1,536, V 49,152).

A subset of C1, C2 and C5, for SmolLM2 in both precisions.
"""

from __future__ import annotations

import pytest
import torch

from lockstep import kernels
from lockstep.core.sampling import SamplingParams
from lockstep.engine import Engine, EngineConfig, Request
from lockstep.models import PackedAttention, load_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived an old fisherman who " * 12,
    "1 + 1 = 2. 2 + 2 = 4. 3 + 3 =",
    "List three reasons to keep bees." * 9,
)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def loaded(request):
    return load_model("smollm2", precision=request.param, quiet=True)


@pytest.fixture(scope="module")
def requests(loaded):
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=loaded.tokenizer.encode(prompt),
            params=SamplingParams(
                max_tokens=16, temperature=0.8, seed=number, prompt_logprobs=0, ignore_eos=True
            ),
        )
        for number, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def run(loaded, bits_of):
    def answers(requests, **config):
        settings = EngineConfig(**{"kv_cache_tokens": 4096, **config})
        return Engine(loaded.model, loaded.tokenizer, settings).run(requests)

    return answers


@pytest.fixture(scope="module")
def alone(run, requests):
    """Each on an engine of its own, one thread."""
    before = kernels.num_threads()
    kernels.set_num_threads(1)
    answers = [run([request])[0] for request in requests]
    kernels.set_num_threads(before)
    return answers


@pytest.mark.parametrize(
    "config",
    [{}, {"max_chunk_tokens": 7, "max_batch_tokens": 32}, {"kv_cache_tokens": 400}],
    ids=["together", "chunks", "few-blocks"],
)
def test_batch_and_schedule_change_nothing(config, run, requests, alone, bits_of, threads):
    assert [*map(bits_of, run(requests, **config))] == [*map(bits_of, alone)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_has_the_engines_bits(loaded, alone, checkpointing):
    model = loaded.model
    sequences = [(*c.prompt_token_ids, *c.samples[0].token_ids) for c in alone]
    tokens_T = torch.tensor([token for tokens in sequences for token in tokens])
    attention = PackedAttention.from_lengths([len(tokens) for tokens in sequences])
    model.activation_checkpointing = checkpointing
    try:
        hidden_TD = model(tokens_T, attention.positions(), attention)
    finally:
        model.activation_checkpointing = False
    inverse_temperature = SamplingParams(temperature=0.8).inverse_temperature
    ends = attention.cu_seqlens_S1[1:].tolist()
    for end, completion in zip(ends, alone, strict=True):
        drawn = completion.samples[0].logprobs
        rows = slice(end - 1 - len(drawn), end - 1)
        targets_R = tokens_T[rows.start + 1 : rows.stop + 1]
        raw = model.token_logprobs(hidden_TD[rows], targets_R)
        scaled = model.token_logprobs(hidden_TD[rows], targets_R, inverse_temperature)
        assert raw.tolist() == [token.logprob for token in drawn]
        assert scaled.tolist() == [token.sampling_logprob for token in drawn]


def test_prompt_logprobs_are_the_trainers(loaded, alone):
    for completion in alone:
        tokens_T = torch.tensor(completion.prompt_token_ids)
        attention = PackedAttention.from_lengths([len(tokens_T)])
        with torch.no_grad():
            hidden_TD = loaded.model(tokens_T, attention.positions(), attention)
            logprobs = loaded.model.token_logprobs(hidden_TD[:-1], tokens_T[1:])
        assert logprobs.tolist() == [entry.logprob for entry in completion.prompt_logprobs[1:]]


def test_a_flipped_bit_is_seen(loaded, run, requests, alone, bits_of):
    weight = loaded.model.get_parameter("model.layers.15.mlp.down_proj.weight")
    integers = weight.data.view(torch.int32 if weight.dtype == torch.float32 else torch.int16)
    index = tuple(int(i) for i in torch.unravel_index(weight.abs().argmax(), weight.shape))

    def flip():
        with torch.no_grad():
            integers[index] ^= 1
            weight.add_(0)  # tells the model's packed copies that it was written to

    flip()
    try:
        assert [*map(bits_of, run(requests))] != [*map(bits_of, alone)]
    finally:
        flip()
    assert [*map(bits_of, run(requests))] == [*map(bits_of, alone)]
