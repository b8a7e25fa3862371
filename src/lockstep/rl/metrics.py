"""A step in numbers, under TRL's names where TRL has one.

Ours beside them: `num_rollouts/*` (failed, without advantage, masked, trained on, and computed
after equal ones were joined), `time/*`, and the ratios of the step's first update, which are those
of an unchanged policy: TRL's `sampling/*` names, here exactly 0 (difference) and 1 (ratio).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.core.records import Trajectory
from lockstep.rl.advantages import group_indices, zero_spread_share
from lockstep.rl.batch import TrainingBatch
from lockstep.rl.loss import PolicyLoss
from lockstep.train.step import StepMetrics


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Rewards and lengths; failed rollouts are counted and otherwise left out."""
    graded = [trajectory for trajectory in trajectories if trajectory.status != "failed"]
    rewards = [trajectory.reward for trajectory in graded]
    groups = [trajectory.group_id for trajectory in graded]
    lengths = [sum(trajectory.loss_mask) for trajectory in graded]
    names = sorted({name for trajectory in graded for name in trajectory.rewards})
    return {
        "reward": _mean(rewards),
        "reward_std": _mean(
            [float(np.std([rewards[i] for i in members])) for members in group_indices(groups)]
        ),
        "frac_reward_zero_std": zero_spread_share(rewards, groups),
        **{
            f"rewards/{name}/mean": _mean(
                [trajectory.rewards[name] for trajectory in graded if name in trajectory.rewards]
            )
            for name in names
        },
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(min(lengths, default=0)),
        "completions/max_length": float(max(lengths, default=0)),
        "completions/clipped_ratio": _mean([float(t.status == "truncated") for t in graded]),
        "num_rollouts/all": float(len(trajectories)),
        "num_rollouts/failed": float(len(trajectories) - len(graded)),
    }


def batch_metrics(batch: TrainingBatch) -> dict[str, float]:
    return {
        "num_rollouts/trained": float(batch.num_trained),
        "num_rollouts/computed": float(len(batch.documents)),
        "num_rollouts/without_advantage": float(batch.num_without_advantage),
        "num_rollouts/masked": float(batch.num_masked),
    }


def first_ratio_metrics(loss: PolicyLoss, update: StepMetrics) -> dict[str, float]:
    """How far trainer and engine are apart under the same weights."""
    sums = update.sums
    num = sums.get("tokens", 1.0)
    has_tokens = "tokens" in sums
    return {
        "sampling/sampling_logp_difference/mean": sums.get("logprob_difference", 0.0) / num,
        "sampling/sampling_logp_difference/max": loss.max_logprob_difference,
        "sampling/importance_sampling_ratio/min": loss.min_ratio if has_tokens else 1.0,
        "sampling/importance_sampling_ratio/mean": sums.get("ratio", 1.0) / num,
        "sampling/importance_sampling_ratio/max": loss.max_ratio if has_tokens else 1.0,
        "sampling/max_ratio_deviation": loss.max_ratio_deviation,
        "sampling/num_mismatches": float(loss.num_mismatches),
        "sampling/num_tokens": sums.get("tokens", 0.0),
    }


def update_metrics(updates: Sequence[StepMetrics]) -> dict[str, float]:
    """Means over the step's updates; entropy, KL and clipping over the tokens trained on."""
    num = sum(update.sums.get("tokens", 0.0) for update in updates) or 1.0
    sums: Mapping[str, float] = {
        name: sum(update.sums.get(name, 0.0) for update in updates)
        for name in ("entropy", "clipped_low", "clipped_high", "kl")
    }
    low, high = sums["clipped_low"] / num, sums["clipped_high"] / num
    row = {
        "loss": _mean([update.loss for update in updates]),
        "grad_norm": _mean([update.grad_norm for update in updates]),
        "entropy": sums["entropy"] / num,
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
    }
    return row | ({"kl": sums["kl"] / num} if any("kl" in u.sums for u in updates) else {})


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
