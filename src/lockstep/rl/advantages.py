"""From rewards to advantages: how much better each rollout did than its fellows.

- grpo: (r - mean) / (std + 1e-4) within the group (Shao et al. 2024, DeepSeekMath, eq. 3), with the
  sample standard deviation, as TRL has it;
- dr_grpo: r - mean, without the division that favours easy and hard prompts (Liu et al. 2025);
- rloo: r - mean of the others (Ahmadian et al. 2024);
- reinforce_plus_plus: discounted returns to go, whitened over all tokens of the batch (Hu 2025).
A group whose rewards are all equal teaches nothing: its advantages are exactly 0, never nan.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"]
Floats = NDArray[np.float64]

EPSILON = 1e-4


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], estimator: Estimator
) -> Floats:
    """One advantage a rollout, taken within its group; for every estimator but REINFORCE++."""
    values = np.asarray(rewards, dtype=np.float64)
    advantages = np.zeros_like(values)
    for members in group_indices(groups):
        advantages[members] = _within_group(values[members], estimator)
    return advantages


def group_indices(groups: Sequence[Hashable]) -> list[list[int]]:
    """Positions of each group's members, groups in order of first appearance."""
    found: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        found.setdefault(group, []).append(index)
    return list(found.values())


def zero_spread_share(rewards: Sequence[float], groups: Sequence[Hashable]) -> float:
    """Share of groups whose rewards are all equal: prompts that taught nothing."""
    all_members = group_indices(groups)
    equal = sum(len({rewards[i] for i in members}) == 1 for members in all_members)
    return equal / len(all_members) if all_members else 0.0


def returns_to_go(rewards: Sequence[float], mask: Sequence[bool], gamma: float) -> Floats:
    """Discounted sum of rewards from each token on; tokens outside `mask` take no time."""
    returns = np.zeros(len(rewards))
    running = 0.0
    for index in reversed(range(len(rewards))):
        running = rewards[index] + (gamma * running if mask[index] else running)
        returns[index] = running
    return returns


def whiten(values: Sequence[Floats], masks: Sequence[Sequence[bool]]) -> list[Floats]:
    """Zero mean and unit variance over all masked-in entries of the batch; 0 elsewhere."""
    if not values:
        return []
    kept = np.concatenate([v[np.asarray(m, bool)] for v, m in zip(values, masks, strict=True)])
    spread = float(kept.std()) if kept.size else 0.0
    mean = float(kept.mean()) if kept.size else 0.0
    scale = 1.0 / (spread + EPSILON) if kept.size and np.ptp(kept) > 0 else 0.0
    return [(v - mean) * scale * np.asarray(m, bool) for v, m in zip(values, masks, strict=True)]


def _within_group(rewards: Floats, estimator: Estimator) -> Floats:
    num = len(rewards)
    if num < 2 or np.ptp(rewards) == 0.0:
        return np.zeros(num)
    scale = 1.0
    if estimator == "grpo":
        scale = 1.0 / (float(rewards.std(ddof=1)) + EPSILON)
    elif estimator == "rloo":
        scale = num / (num - 1)
    else:
        assert estimator == "dr_grpo", f"{estimator} is not taken within a group"
    return np.asarray((rewards - rewards.mean()) * scale)
