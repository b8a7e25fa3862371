"""Fused cross-entropy: against fp64, gradients, agreement of the fused and the logits form to the
bit.
"""

from __future__ import annotations

import pytest
import torch

from lockstep import kernels
from lockstep.kernels.cross_entropy import (
    logprobs_of,
    token_statistics,
    weighted_logprob_sum,
)
from lockstep.kernels.linear import PackCache, linear


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shape", [(1, 8, 3), (5, 64, 700), (300, 32, 1029)], ids=str)
def test_values_and_gradients(isa, dtype, normal, assert_close, shape, temperature):
    t, d, v = shape
    hidden, weight = (
        normal(t, d, dtype=dtype).requires_grad_(),
        normal(v, d).mul(0.3).requires_grad_(),
    )
    targets = torch.arange(t) * 7 % v
    statistics = token_statistics(
        hidden, weight, targets, packs=PackCache(), inverse_temperature=1 / temperature
    )
    weights = normal(t)
    (statistics.logprobs_T * weights).sum().backward()

    h, w = (
        hidden.detach().double().requires_grad_(),
        weight.detach().to(dtype).double().requires_grad_(),
    )
    logp = torch.log_softmax(h @ w.t() / temperature, -1)
    exact = logp.gather(1, targets[:, None])[:, 0]
    (exact * weights.double()).sum().backward()
    assert_close(statistics.logprobs_T, exact, scale=8)
    assert_close(statistics.entropy_T, -(logp.exp() * logp).sum(-1), scale=8)
    assert_close(hidden.grad, h.grad, scale=8)
    assert_close(weight.grad, w.grad, scale=20 if dtype == torch.float32 else 4000)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 3), (300, 32, 1029)], ids=str)
def test_gradients_made_in_the_forward_pass(isa, dtype, normal, assert_close, shape, is_frozen):
    """Of a weighted sum, and of logprobs under a frozen projection; logprobs keep their bits."""
    t, d, v = shape
    hidden, weight = normal(t, d, dtype=dtype).requires_grad_(), normal(v, d).mul(0.3)
    weight.requires_grad_(not is_frozen)
    targets, weights, packs = torch.arange(t) * 7 % v, normal(t), PackCache()
    with torch.no_grad():
        plain = token_statistics(hidden, weight, targets, packs=packs, inverse_temperature=0.7)
    result = weighted_logprob_sum(
        hidden, weight, targets, weights, packs=packs, inverse_temperature=0.7
    )
    assert result.total == (plain.logprobs_T * weights).sum()
    assert torch.equal(result.entropy_T, plain.entropy_T)
    (result.total * -0.5).backward()
    gradients = [hidden.grad]
    if is_frozen:
        hidden.grad = None
        again = token_statistics(hidden, weight, targets, packs=packs, inverse_temperature=0.7)
        assert torch.equal(again.logprobs_T, plain.logprobs_T)
        ((again.logprobs_T * weights).sum() * -0.5).backward()
        gradients.append(hidden.grad)

    h, w = (
        hidden.detach().double().requires_grad_(),
        weight.detach().to(dtype).double().requires_grad_(),
    )
    exact = torch.log_softmax(h @ w.t() * 0.7, -1).gather(1, targets[:, None])[:, 0]
    ((exact * weights.double()).sum() * -0.5).backward()
    for gradient in gradients:
        assert_close(gradient, h.grad, scale=8)
    if not is_frozen:
        assert_close(weight.grad, w.grad, scale=20 if dtype == torch.float32 else 4000)


def test_fused_and_logits_forms_agree_to_the_bit(dtype, normal):
    t, d, v = 131, 48, 1500
    hidden, weight, packs = normal(t, d, dtype=dtype), normal(v, d), PackCache()
    targets = torch.arange(t) * 11 % v
    scale = torch.linspace(0.5, 2.0, t)
    fused = token_statistics(
        hidden, weight, targets, packs=packs, inverse_temperature=scale
    ).logprobs_T
    for row in range(t):
        logits = linear(hidden[row : row + 1], weight, packs=packs, fp32_out=True)
        alone = logprobs_of(logits, targets[row : row + 1], scale[row : row + 1])
        assert torch.equal(alone[0], fused[row])


def test_banned_tokens_are_harmless(normal):
    logits = normal(2, 500)
    logits[:, 100:] = float("-inf")
    statistics = torch.ops.lockstep.row_logprobs(logits, torch.tensor([3, 300]), torch.ones(2))
    want = torch.log_softmax(logits.double(), -1)
    assert torch.allclose(statistics[0][0].double(), want[0, 3], atol=1e-6)
    assert statistics[0][1] == float("-inf")
    assert torch.isfinite(statistics[2]).all()


def test_native_matches_reference(normal):
    hidden, weight, packs = normal(9, 16), normal(300, 16), PackCache()
    targets = torch.arange(9)
    native = token_statistics(hidden, weight, targets, packs=packs)
    with kernels.use_reference():
        reference = token_statistics(hidden, weight, targets, packs=packs)
    assert torch.allclose(native.logprobs_T, reference.logprobs_T, atol=2e-6)
    assert torch.allclose(native.entropy_T, reference.entropy_T, atol=1e-5)
