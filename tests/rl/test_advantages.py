from __future__ import annotations

import numpy as np
import pytest

from lockstep.rl.advantages import (
    EPSILON,
    Estimator,
    group_advantages,
    returns_to_go,
    whiten,
    zero_spread_share,
)


def test_grpo_divides_by_the_sample_deviation() -> None:
    advantages = group_advantages([1, 0, 0, 1], ["a"] * 4, "grpo")
    deviation = np.std([1, 0, 0, 1], ddof=1)
    np.testing.assert_allclose(advantages, np.array([0.5, -0.5, -0.5, 0.5]) / (deviation + EPSILON))


def test_dr_grpo_does_not_divide() -> None:
    assert group_advantages([1, 0, 0, 0], ["a"] * 4, "dr_grpo").tolist() == [0.75] + [-0.25] * 3


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    rewards = [1.0, 0.5, 0.0, 0.25]
    expected = [r - (sum(rewards) - r) / 3 for r in rewards]
    np.testing.assert_allclose(group_advantages(rewards, ["a"] * 4, "rloo"), expected)


def test_groups_are_apart_even_when_interleaved() -> None:
    together = group_advantages([1, 5, 0, 3], ["a", "b", "a", "b"], "dr_grpo")
    assert together.tolist() == [0.5, 1.0, -0.5, -1.0]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_give_exactly_zero(estimator: Estimator) -> None:
    # 0.1 has no exact mean in floating point: the difference from it is not 0 by itself.
    rewards, groups = [0.1] * 3 + [1.0, 0.0, 0.0] + [0.3], ["a"] * 3 + ["b"] * 3 + ["alone"]
    advantages = group_advantages(rewards, groups, estimator)
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert advantages[6] == 0.0
    assert np.isfinite(advantages).all()
    assert zero_spread_share(rewards, groups) == pytest.approx(2 / 3)


def test_returns_to_go_skip_masked_tokens() -> None:
    returns = returns_to_go([0.0, 0.0, 1.0], [True, False, True], 0.5)
    assert returns.tolist() == [0.5, 1.0, 1.0]


def test_whitening_is_over_drawn_tokens_only() -> None:
    values = [np.array([9.0, 1.0, 2.0]), np.array([9.0, 3.0])]
    masks = [[False, True, True], [False, True]]
    whitened = whiten(values, masks)
    kept = np.array([whitened[0][1], whitened[0][2], whitened[1][1]])
    assert kept.mean() == pytest.approx(0)
    assert kept.std() == pytest.approx(1, abs=1e-3)
    assert whitened[0][0] == whitened[1][0] == 0.0


def test_whitening_equal_returns_gives_zeros() -> None:
    assert whiten([np.full(2, 0.1)], [[True, True]])[0].tolist() == [0.0, 0.0]
