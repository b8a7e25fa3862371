"""Drawing tokens: against the reference, the right distribution, filters, and noise that knows only
its key.
"""

from __future__ import annotations

import pytest
import torch

from lockstep import kernels
from lockstep.kernels.cross_entropy import logprobs_of
from lockstep.kernels.sampling import SampleResult, sample
from lockstep.kernels.sampling.reference import kept_mask, philox


def draw(
    logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0
) -> SampleResult:
    rows = logits.shape[0]

    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

    return sample(
        logits,
        temperature_S=column(temperature, torch.float32),
        top_k_S=column(top_k, torch.int64),
        top_p_S=column(top_p, torch.float32),
        min_p_S=column(min_p, torch.float32),
        seed_S=column(seed, torch.int64),
        position_S=column(position, torch.int64),
    )


def test_philox_known_answers():
    """Random123's test vectors for philox4x32-10: all zero, and all ones in the two keys we use."""
    assert philox(0, 0, 4).tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9}]
)
def test_native_equals_reference(isa, normal, filters):
    logits = normal(40, 3000).mul(3)
    arguments = {
        "seed": torch.arange(40) - 20,
        "position": torch.arange(40) * 1000,
        "temperature": 0.8,
    }
    native = draw(logits, **arguments, **filters)
    with kernels.use_reference():
        reference = draw(logits, **arguments, **filters)
    assert torch.equal(native.token_ids_S, reference.token_ids_S)
    assert torch.allclose(native.sampling_logprobs_S, reference.sampling_logprobs_S, atol=2e-5)


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.zeros(2, 1000)
    logits[0, [7, 900]] = 3.0
    result = draw(logits, temperature=0.0)
    assert result.token_ids_S.tolist() == [7, 0]
    assert result.sampling_logprobs_S.tolist() == [0.0, 0.0]


def test_frequencies_follow_the_softmax():
    """Chi-squared over 20,000 draws of 6 tokens; the bound is the 1e-6 quantile at 5 degrees."""
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5, -3.0]])
    rows = 20_000
    tokens = draw(
        logits.expand(rows, -1).contiguous(), seed=torch.arange(rows), position=5
    ).token_ids_S
    expected = logits[0].softmax(0).double() * rows
    observed = torch.bincount(tokens, minlength=6).double()
    assert ((observed - expected).square() / expected).sum() < 35.9


def test_positions_of_one_seed_are_independent():
    logits = torch.zeros(1, 2).expand(4000, -1).contiguous()
    tokens = draw(logits, seed=42, position=torch.arange(4000)).token_ids_S
    assert 1800 < tokens.sum() < 2200
    assert 1800 < (tokens[1:] != tokens[:-1]).sum() < 2200


@pytest.mark.parametrize("filters", [(3, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.2), (10, 0.7, 0.05)])
def test_only_kept_tokens_are_drawn(normal, filters):
    top_k, top_p, min_p = filters
    logits = normal(1, 50).mul(2)
    kept = kept_mask(logits[0], top_k, top_p, min_p)
    result = draw(
        logits.expand(2000, -1).contiguous(),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=torch.arange(2000),
    )
    assert set(result.token_ids_S.tolist()) == set(kept.nonzero()[:, 0].tolist())


def test_a_row_never_depends_on_the_others(normal):
    logits = normal(33, 777)
    keys = {
        "seed": torch.arange(33),
        "position": torch.arange(33),
        "temperature": 0.9,
        "top_p": 0.8,
    }
    together = draw(logits, **keys)
    for i in range(33):
        alone = draw(logits[i : i + 1].clone(), seed=i, position=i, temperature=0.9, top_p=0.8)
        assert alone.token_ids_S[0] == together.token_ids_S[i]
        assert torch.equal(alone.sampling_logprobs_S[0], together.sampling_logprobs_S[i])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampling_logprob_is_the_trainers_to_the_bit(normal, temperature):
    logits = normal(50, 1234).mul(2)
    result = draw(logits, temperature=temperature, seed=torch.arange(50))
    scale = 1.0 / torch.full((50,), temperature)
    assert torch.equal(result.sampling_logprobs_S, logprobs_of(logits, result.token_ids_S, scale))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 63, 1000, 1002])
def test_a_row_that_is_not_numbers_draws_nothing_and_leaves_its_neighbours_alone(
    isa, normal, temperature, bad, place
):
    clean = normal(3, 1003)
    broken = clean.clone()
    broken[1, place] = bad
    expected = draw(clean, temperature=temperature, seed=torch.arange(3))
    got = draw(broken, temperature=temperature, seed=torch.arange(3))
    with kernels.use_reference():
        reference = draw(broken, temperature=temperature, seed=torch.arange(3))
    for result in (got, reference):
        assert result.token_ids_S[1] == 0
        assert result.sampling_logprobs_S.isnan().tolist() == [False, True, False]
    assert torch.equal(got.token_ids_S[::2], expected.token_ids_S[::2])
    assert torch.equal(got.sampling_logprobs_S[::2], expected.sampling_logprobs_S[::2])
    if bad != bad:
        logprobs = logprobs_of(broken, torch.tensor([5, 5, 5]))
        assert logprobs.isnan().tolist() == [False, True, False]


def test_nothing_can_be_drawn_where_every_token_is_masked(isa):
    result = draw(torch.full((1, 100), float("-inf")), temperature=0.0)
    assert result.sampling_logprobs_S.isnan().all()


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("top_p", [0.2, 0.95, 0.9999])
def test_a_nucleus_of_any_size(isa, normal, spread, top_p):
    """From a handful to nearly all of 5,003 tokens: sorted head and bins agree with a sort."""
    logits = normal(6, 5003).mul(spread)
    arguments = {"top_p": top_p, "seed": torch.arange(6), "position": 7}
    native = draw(logits, **arguments)
    with kernels.use_reference():
        reference = draw(logits, **arguments)
    assert torch.equal(native.token_ids_S, reference.token_ids_S)
    assert torch.allclose(native.sampling_logprobs_S, reference.sampling_logprobs_S, atol=2e-5)


def test_equals_at_the_edge_of_top_k_and_top_p_go_to_the_lower_id(isa):
    logits = torch.zeros(1, 4099)
    for filters, last in (({"top_k": 5}, 4), ({"top_p": 0.25}, 1024)):
        tokens = draw(logits.expand(400, -1).contiguous(), seed=torch.arange(400), **filters)
        assert tokens.token_ids_S.max() <= last
        assert tokens.token_ids_S.unique().numel() > min(last, 100)
