"""What the sampler reports, and that a row's result is the same alone and among others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.sampling import SamplingParams
from lockstep.engine.sampler import Draw, describe_tokens, draw_tokens
from lockstep.kernels.cross_entropy import logprobs_of

VOCAB = 97


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draw_of(seed: int = 1, output=(), prompt=(1, 2, 3), **params) -> Draw:
    return Draw(
        params=SamplingParams(**params), seed=seed, prompt=prompt, output=output, end_tokens={5}
    )


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 5, 96, 97, 200]),
        "top_p": st.sampled_from([0.1, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "presence_penalty": st.sampled_from([-1.0, 0.5]),
        "frequency_penalty": st.sampled_from([-0.5, 1.0]),
        "logit_bias": st.sampled_from([{0: 5.0}, {5: -100.0, 96: 3.0}]),
        "min_tokens": st.sampled_from([0, 4]),
        "logprobs": st.sampled_from([0, 1, 5]),
    },
)
ROWS = st.lists(
    st.tuples(PARAMS, st.integers(-(2**63), 2**64 - 1), st.lists(st.integers(0, 96), max_size=6)),
    min_size=1,
    max_size=8,
)


@given(rows=ROWS, seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_a_row_is_the_same_alone_and_among_others(rows, seed):
    logits_RV = logits_of(seed, len(rows))
    draws = [draw_of(row_seed, output, **params) for params, row_seed, output in rows]
    together = draw_tokens(logits_RV, draws)
    alone = [draw_tokens(logits_RV[i : i + 1], [draw])[0] for i, draw in enumerate(draws)]
    assert together == alone


@pytest.mark.parametrize("temperature", [0.3, 0.7, 0.9, 1.0, 1.3, 2.0])
def test_sampling_logprob_under_temperature_alone_has_the_trainers_bits(temperature):
    logits_RV = logits_of(4, 32)
    params = SamplingParams(temperature=temperature)
    drawn = draw_tokens(logits_RV, [draw_of(i, temperature=temperature) for i in range(32)])
    tokens_R = torch.tensor([token.token_id for token in drawn])
    expected = logprobs_of(logits_RV, tokens_R, params.inverse_temperature)
    assert [token.sampling_logprob for token in drawn] == expected.tolist()
    assert [token.logprob for token in drawn] == logprobs_of(logits_RV, tokens_R).tolist()


def test_greedy_takes_the_lowest_id_among_equals_with_sampling_logprob_zero():
    logits_RV = torch.zeros(1, VOCAB)
    logits_RV[0, [40, 20]] = 1.0
    (token,) = draw_tokens(logits_RV, [draw_of(temperature=0.0)])
    assert (token.token_id, token.sampling_logprob) == (20, 0.0)


def test_the_position_of_the_drawn_token_keys_the_noise_not_how_it_is_split():
    logits_RV = logits_of(9)
    first = draw_tokens(logits_RV, [draw_of(prompt=(1, 2, 3), output=(4,))])
    second = draw_tokens(logits_RV, [draw_of(prompt=(1, 2), output=(3, 4))])
    assert first == second


def test_draws_follow_the_distribution():
    logits_RV = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).expand(4000, -1).contiguous()
    draws = [
        Draw(params=SamplingParams(), seed=i, prompt=(0,), output=(), end_tokens=())
        for i in range(4000)
    ]
    tokens = torch.tensor([token.token_id for token in draw_tokens(logits_RV, draws)])
    shares = torch.bincount(tokens, minlength=3) / 4000
    assert torch.allclose(shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.03)


@pytest.mark.parametrize("bias", [3.0, -100.0])
def test_the_raw_logprob_is_that_of_the_raw_logits(bias):
    logits_RV = logits_of(2)
    (token,) = draw_tokens(logits_RV, [draw_of(logit_bias={7: bias}, top_k=3, temperature=0.5)])
    assert token.logprob == float(logprobs_of(logits_RV, torch.tensor([token.token_id])))
    assert token.sampling_logprob != token.logprob


def test_top_logprobs_and_rank_agree_with_a_full_sort():
    logits_RV = logits_of(11, 5)
    drawn = draw_tokens(logits_RV, [draw_of(i, logprobs=4) for i in range(5)])
    logprobs_RV = torch.log_softmax(logits_RV.double(), -1)
    for row, token in enumerate(drawn):
        order = logprobs_RV[row].argsort(descending=True).tolist()
        assert [alternative for alternative, _ in token.top] == order[:4]
        assert order[token.rank - 1] == token.token_id
        expected = logprobs_RV[row][order[:4]].tolist()
        assert [logprob for _, logprob in token.top] == pytest.approx(expected, abs=1e-5)


def test_among_equal_alternatives_the_lower_ids_are_reported():
    logits_RV = torch.zeros(1, VOCAB)
    (token,) = describe_tokens(logits_RV, torch.tensor([50]), num_top=3)
    assert [alternative for alternative, _ in token.top] == [0, 1, 2]
    assert token.rank == 1


def test_more_alternatives_than_the_vocabulary_has_are_all_of_it():
    (token,) = describe_tokens(torch.zeros(1, 3), torch.tensor([1]), num_top=5)
    assert len(token.top) == 3
