"""The loss and its gradient against GRPO written out plainly, one sequence at a time."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from lockstep.models.attention import PackedAttention
from lockstep.rl.batch import make_batch
from lockstep.rl.config import AlgorithmConfig
from lockstep.rl.loss import BEHAVIOUR, MismatchError, PolicyLoss, kl_estimate
from lockstep.train.config import OptimizerConfig
from lockstep.train.optimizer import build_optimizer
from lockstep.train.packing import pack
from lockstep.train.step import target_statistics, train_step

TEMPERATURE = 0.7


def logprobs_of(model, token_ids, temperature=TEMPERATURE):
    """Logprob of every token but the first, from whole logits."""
    tokens = torch.tensor(token_ids)
    attention = PackedAttention.from_lengths([len(tokens)])
    logits = model.logits(model(tokens, torch.arange(len(tokens)), attention))
    logprobs = torch.log_softmax(logits[:-1] / temperature, dim=-1)
    return logprobs.gather(1, tokens[1:, None])[:, 0]


def plain_grpo(model, trajectories, config, reference=None):
    """GRPO, DAPO and Dr.GRPO as the papers write them."""
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    advantages = rewards - rewards.mean()
    if config.loss != "dr_grpo":
        advantages = advantages / (rewards.std() + 1e-4)
    token_losses = []
    for trajectory, advantage in zip(trajectories, advantages.float(), strict=True):
        mask = torch.tensor(trajectory.loss_mask[1:])
        new = logprobs_of(model, trajectory.token_ids)[mask]
        old = torch.tensor(trajectory.behaviour_logprobs[1:])[mask]
        ratio = (new - old).exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
        if reference is not None:
            with torch.no_grad():
                ref = logprobs_of(reference, trajectory.token_ids)[mask]
            loss = loss + config.kl_beta * ((ref - new).exp() - 1 - (ref - new))
        token_losses.append(loss)
    if config.loss == "grpo":
        return torch.stack([loss.mean() for loss in token_losses]).mean()
    if config.loss == "dapo":
        return torch.cat(token_losses).mean()
    return torch.stack([loss.sum() / 16 for loss in token_losses]).mean()


@pytest.fixture
def rollouts(tiny_model, make_trajectory):
    """Four rollouts whose recorded logprobs are a little off, so that some ratios are clipped."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for reward, drawn in ((1.0, 2), (0.0, 5), (0.5, 9), (0.0, 3)):
        trajectory = make_trajectory(reward=reward, drawn=drawn)
        with torch.no_grad():
            exact = logprobs_of(tiny_model, trajectory.token_ids)[-drawn:]
        noisy = exact + 0.3 * torch.randn(drawn, generator=generator)
        behaviour = (0.0,) * 3 + tuple(noisy.tolist())
        found.append(make_trajectory(reward=reward, drawn=drawn, behaviour_logprobs=behaviour))
    return [*found, found[1]]  # drawn twice: computed once


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("kl_beta", [0.0, 0.3])
@pytest.mark.parametrize("micro_batch_tokens", [12, 1000])
def test_gradient_is_that_of_plain_grpo(
    tiny_model, rollouts, loss, kl_beta, micro_batch_tokens
) -> None:
    config = AlgorithmConfig(loss=loss, kl_beta=kl_beta, clip_low=0.1, clip_high=0.2)
    reference = deepcopy(tiny_model)
    reference.initialise(seed=5)
    expected = plain_grpo(tiny_model, rollouts, config, reference if kl_beta else None)
    gradients = torch.autograd.grad(expected, list(tiny_model.parameters()))

    @contextmanager
    def use_reference():
        yield reference

    policy_loss = PolicyLoss(
        config,
        inverse_temperature=1 / TEMPERATURE,
        is_on_policy=False,
        reference=use_reference if kl_beta else None,
    )
    batch = make_batch(rollouts, config, max_tokens=16)
    assert (len(batch.documents), batch.num_trained) == (4, 5)
    optimizer = build_optimizer(tiny_model, OptimizerConfig())
    metrics = train_step(
        tiny_model,
        optimizer,
        pack(batch.documents, max_tokens=micro_batch_tokens),
        policy_loss,
        normaliser=batch.normaliser,
        max_grad_norm=None,
    )
    assert metrics.loss == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    assert metrics.sums["tokens"] == 2 + 5 + 9 + 3 + 5
    assert metrics.sums["clipped_low"] + metrics.sums["clipped_high"] > 0
    assert policy_loss.max_ratio_deviation > 0.1
    for parameter, gradient in zip(tiny_model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


def trained_on(model, trajectories, policy_loss):
    batch = make_batch(trajectories, AlgorithmConfig(), max_tokens=16)
    for micro_batch in pack(batch.documents, max_tokens=64):
        policy_loss(model, micro_batch)
    return policy_loss


def test_a_first_ratio_that_is_not_1_fails_loudly(tiny_model, rollouts) -> None:
    strict = PolicyLoss(AlgorithmConfig(), inverse_temperature=1.0, is_on_policy=True)
    with pytest.raises(MismatchError, match="disagree on 19 of 19 tokens"):
        trained_on(tiny_model, rollouts, strict)
    config = AlgorithmConfig(on_mismatch="warn")
    lenient = PolicyLoss(config, inverse_temperature=1.0, is_on_policy=True)
    assert trained_on(tiny_model, rollouts, lenient).num_mismatches == 19


def test_one_bit_of_one_logprob_is_enough_to_fail(tiny_model, rollouts) -> None:
    """The trainer's own logprobs as recorded ones: no mismatch. One bit flipped: a mismatch."""
    batch = make_batch(rollouts, AlgorithmConfig(), max_tokens=16)
    (micro_batch,) = pack(batch.documents, max_tokens=64)
    with torch.no_grad():
        recorded = target_statistics(tiny_model, micro_batch).logprobs_T

    def run(logprobs):
        columns = {**micro_batch.columns, BEHAVIOUR: logprobs}
        loss = PolicyLoss(AlgorithmConfig(), inverse_temperature=1.0, is_on_policy=True)
        loss(tiny_model, replace(micro_batch, columns=columns))
        return loss

    exact = run(recorded)
    assert exact.min_ratio == exact.max_ratio == 1.0
    assert exact.max_ratio_deviation == exact.max_logprob_difference == 0.0
    flipped = recorded.clone()
    flipped.view(torch.int32)[4] ^= 1
    with pytest.raises(MismatchError, match="disagree on 1 of 19 tokens"):
        run(flipped)


def test_kl_estimators() -> None:
    """In expectation over the policy's own draws, all three approximate the exact divergence."""
    policy = torch.tensor([0.5, 0.3, 0.2])
    reference = torch.tensor([0.4, 0.35, 0.25])
    exact = (policy * (policy / reference).log()).sum()
    for estimator, tolerance in (("k1", 1e-6), ("k2", 2e-3), ("k3", 1e-6)):
        values = kl_estimate(policy.log(), reference.log(), estimator=estimator)
        assert (policy * values).sum().item() == pytest.approx(exact.item(), abs=tolerance)
    assert (kl_estimate(policy.log(), reference.log(), estimator="k3") >= 0).all()
