"""C5: the trainer's forward on a request's tokens gives the engine's logprobs, bit for bit.

Packed with strangers, padded, with activation checkpointing, from fp32 master weights, with LoRA
adapters, raw and at the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest
import torch

from lockstep.core.sampling import SamplingParams
from lockstep.engine import Request
from lockstep.models import Llama, LoraConfig, PackedAttention, apply_lora
from lockstep.train.packing import Document, pack
from lockstep.train.step import target_statistics

TEMPERATURE = 0.7  # 1 / 0.7 in fp32 is not what 1 / 0.7 in double rounds to for every such number
INVERSE_TEMPERATURE = SamplingParams(temperature=TEMPERATURE).inverse_temperature
PAD = 0


def run(engine_of, model: Llama, requests_of, *, count: int = 6):
    """Completions of random prompts at TEMPERATURE, prompt logprobs included."""
    params = SamplingParams(
        max_tokens=20, temperature=TEMPERATURE, seed=11, prompt_logprobs=0, ignore_eos=True
    )
    requests = [
        Request(request_id=r.request_id, prompt_token_ids=r.prompt_token_ids, params=params)
        for r in requests_of(count, seed=4)
    ]
    return engine_of(model, max_chunk_tokens=50).run(requests)


def engine_logprobs(completion) -> list[float]:
    """Raw logprobs of all tokens but the first."""
    prompt = [entry.logprob for entry in completion.prompt_logprobs[1:]]
    return prompt + [token.logprob for token in completion.samples[0].logprobs]


def tokens_of(completion) -> list[int]:
    return [*completion.prompt_token_ids, *completion.samples[0].token_ids]


def trainer_logprobs(
    model: Llama, sequences: Sequence[Sequence[int]], *, inverse_temperature: float = 1.0
) -> list[list[float]]:
    """Logprobs of all tokens but the first of each, as training computes them, packed."""
    tokens_T = torch.tensor([token for tokens in sequences for token in tokens])
    attention = PackedAttention.from_lengths([len(tokens) for tokens in sequences])
    hidden_TD = model(tokens_T, attention.positions(), attention)
    targets_T = tokens_T.roll(-1)
    logprobs = model.token_logprobs(hidden_TD, targets_T, inverse_temperature).tolist()
    ends = attention.cu_seqlens_S1.tolist()
    return [logprobs[a : b - 1] for a, b in pairwise(ends)]


@pytest.fixture(scope="module")
def completions_of(shared_model, engine_of, requests_of):
    return cache(
        lambda family, precision: run(engine_of, shared_model(family, precision), requests_of)
    )


def test_one_sequence(family, precision, threads, shared_model, completions_of):
    model = shared_model(family, precision)
    for completion in completions_of(family, precision):
        (logprobs,) = trainer_logprobs(model, [tokens_of(completion)])
        assert logprobs == engine_logprobs(completion)


def test_packed_with_others(family, precision, shared_model, completions_of):
    completions = completions_of(family, precision)
    logprobs = trainer_logprobs(shared_model(family, precision), [*map(tokens_of, completions)])
    assert logprobs == [engine_logprobs(completion) for completion in completions]


def test_padded(family, precision, shared_model, completions_of):
    """Padding at the right of each sequence, as a batch of one length would have it."""
    completions = completions_of(family, precision)
    longest = max(len(tokens_of(completion)) for completion in completions)
    padded = [tokens_of(c) + [PAD] * (longest - len(tokens_of(c))) for c in completions]
    rows = trainer_logprobs(shared_model(family, precision), padded)
    for row, completion in zip(rows, completions, strict=True):
        expected = engine_logprobs(completion)
        assert row[: len(expected)] == expected


def test_packed_by_the_trainer_at_the_sampling_temperature(
    family, precision, shared_model, completions_of
):
    """Through `lockstep.train`'s own packing, drawn tokens only: RL's first ratio is exactly 1."""
    completions = completions_of(family, precision)
    documents = []
    for completion in completions:
        num_drawn = len(completion.samples[0].token_ids)
        tokens = tokens_of(completion)
        sampled = [token.sampling_logprob for token in completion.samples[0].logprobs]
        documents.append(
            Document(
                token_ids=tokens,
                loss_weights=[0.0] * (len(tokens) - num_drawn) + [1.0] * num_drawn,
                columns={"old": [0.0] * (len(tokens) - num_drawn) + sampled},
            )
        )
    num_compared = 0
    for micro_batch in pack(documents, max_tokens=400):
        logprobs_R = target_statistics(
            shared_model(family, precision), micro_batch, inverse_temperature=INVERSE_TEMPERATURE
        ).logprobs_T
        assert torch.equal(logprobs_R, micro_batch.columns["old"].float())
        num_compared += len(logprobs_R)
    assert num_compared == sum(len(c.samples[0].token_ids) for c in completions)


def test_activation_checkpointing(family, precision, fresh_model, completions_of):
    """Forward and recomputation both: the gradients are those without checkpointing."""
    completions = completions_of(family, precision)
    sequences = [*map(tokens_of, completions)]
    gradients = []
    for checkpointing in (False, True):
        model = fresh_model(family, precision)
        model.activation_checkpointing = checkpointing
        logprobs = trainer_logprobs(model, sequences)
        assert logprobs == [engine_logprobs(completion) for completion in completions]
        tokens_T = torch.tensor(sequences[0])
        attention = PackedAttention.from_lengths([len(tokens_T)])
        hidden_TD = model(tokens_T, attention.positions(), attention)
        model.token_logprobs(hidden_TD[:-1], tokens_T[1:]).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4", "fp8"])
def test_master_weights(family, precision, fresh_model, completions_of):
    """fp32 masters computed in bf16, or rounded to fewer bits before each product, have the bits of
    the same weights rounded for serving.
    """
    completions = completions_of(family, precision)
    masters = fresh_model(family, precision, param_dtype=torch.float32)
    assert masters.model.norm.weight.dtype == torch.float32
    logprobs = trainer_logprobs(masters, [*map(tokens_of, completions)])
    assert logprobs == [engine_logprobs(completion) for completion in completions]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora(family, precision, fresh_model, engine_of, requests_of, checkpointing):
    model = fresh_model(family, precision)
    apply_lora(model, LoraConfig(r=4, alpha=8.0))
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.activation_checkpointing = checkpointing
    completions = run(engine_of, model, requests_of, count=3)
    logprobs = trainer_logprobs(model, [*map(tokens_of, completions)])
    assert logprobs == [engine_logprobs(completion) for completion in completions]


def test_training_between_rollouts(family, precision, fresh_model, engine_of, requests_of):
    """Engine and trainer share one model: after an optimizer step both have the new bits."""
    model = fresh_model(family, precision, param_dtype=torch.float32)
    engine = engine_of(model)
    (request,) = requests_of(1, seed=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for version in range(3):
        (completion,) = engine.run(
            [
                Request(
                    request_id="r",
                    prompt_token_ids=request.prompt_token_ids,
                    params=SamplingParams(max_tokens=16, seed=1, prompt_logprobs=0),
                )
            ]
        )
        (logprobs,) = trainer_logprobs(model, [tokens_of(completion)])
        assert logprobs == engine_logprobs(completion)
        seen.append(logprobs)
        tokens_T = torch.tensor(tokens_of(completion))
        attention = PackedAttention.from_lengths([len(tokens_T)])
        hidden_TD = model(tokens_T, attention.positions(), attention)
        (-model.token_logprobs(hidden_TD[:-1], tokens_T[1:]).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.weights_updated(version + 1)
    assert seen[0] != seen[1] != seen[2]
