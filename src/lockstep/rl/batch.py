"""From trajectories to what the trainer packs: advantages, loss weights, and the normaliser.

The aggregation of the loss is in the weights, so that any split into micro-batches gives the same
gradient: with N rollouts, of L_i drawn tokens each,

    grpo     weight 1 / L_i          normaliser N       each rollout's mean counts once
    dapo     weight 1                normaliser sum L_i every token counts once
    dr_grpo  weight 1 / max_tokens   normaliser N       no bias by length

Two savings that leave the gradient as it is: a rollout with advantage 0 has gradient 0 unless KL is
on, so it is left out of the forward pass but stays in the normaliser; and rollouts that drew the
same tokens at the same advantage, common where answers are short, are computed once with the weight
of all. Failed rollouts are in neither.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.core.records import Trajectory
from lockstep.rl.advantages import Floats, group_advantages, returns_to_go, whiten
from lockstep.rl.config import AlgorithmConfig
from lockstep.rl.loss import ADVANTAGE, BEHAVIOUR, NUM_COPIES
from lockstep.train.packing import Document

Rollout = tuple[Trajectory, Floats]
"""With its advantage at each token."""


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """Documents to pack, and how many rollouts were spared."""

    documents: list[Document]
    normaliser: float
    num_trained: int
    """Rollouts that the documents stand for; at least as many as there are documents."""
    num_without_advantage: int
    num_masked: int
    """Failed rollouts, and truncated ones if `mask_truncated`."""


def make_batch(
    trajectories: Sequence[Trajectory], config: AlgorithmConfig, *, max_tokens: int
) -> TrainingBatch:
    """Advantages are taken over all gradable rollouts, masked-out truncated ones included."""
    graded = [trajectory for trajectory in trajectories if trajectory.status != "failed"]
    advantages = token_advantages(graded, config)
    used = [
        (trajectory, advantage)
        for trajectory, advantage in zip(graded, advantages, strict=True)
        if not (config.mask_truncated and trajectory.status == "truncated")
    ]
    lengths = [sum(trajectory.loss_mask) for trajectory, _ in used]
    trained = [
        (trajectory, advantage)
        for trajectory, advantage in used
        if config.kl_beta > 0 or advantage.any()
    ]
    documents = []
    for copies in _equal_rollouts(trained):
        trajectory, advantage = copies[0]
        length = max(sum(trajectory.loss_mask), 1)
        divisor = {"grpo": length, "dapo": 1, "dr_grpo": max_tokens}[config.loss]
        documents.append(_document(trajectory, advantage, divisor, num_copies=len(copies)))
    return TrainingBatch(
        documents=documents,
        normaliser=float(max(sum(lengths) if config.loss == "dapo" else len(used), 1)),
        num_trained=len(trained),
        num_without_advantage=len(used) - len(trained),
        num_masked=len(trajectories) - len(used),
    )


def token_advantages(trajectories: Sequence[Trajectory], config: AlgorithmConfig) -> list[Floats]:
    """One advantage for each token of each trajectory; 0 where the policy did not draw."""
    rewards = [trajectory.reward for trajectory in trajectories]
    masks = [trajectory.loss_mask for trajectory in trajectories]
    if config.estimator == "reinforce_plus_plus":
        returns = [
            returns_to_go(_at_last_token(reward, len(mask)), mask, config.gamma)
            for reward, mask in zip(rewards, masks, strict=True)
        ]
        return whiten(returns, masks)
    groups = [trajectory.group_id for trajectory in trajectories]
    per_rollout = group_advantages(rewards, groups, config.estimator)
    return [
        advantage * np.asarray(mask, dtype=np.float64)
        for advantage, mask in zip(per_rollout, masks, strict=True)
    ]


def _at_last_token(reward: float, length: int) -> list[float]:
    return [0.0] * (length - 1) + [reward]


def _equal_rollouts(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Rollouts whose every term of the loss is the same, together; in order of first appearance."""
    found: dict[Hashable, list[Rollout]] = {}
    for trajectory, advantage in rollouts:
        key = (trajectory.token_ids, trajectory.behaviour_logprobs, advantage.tobytes())
        found.setdefault(key, []).append((trajectory, advantage))
    return list(found.values())


def _document(
    trajectory: Trajectory, advantage: Floats, divisor: float, *, num_copies: int
) -> Document:
    mask = np.asarray(trajectory.loss_mask, dtype=np.float32)
    return Document(
        token_ids=trajectory.token_ids,
        loss_weights=mask * np.float32(num_copies / divisor),
        columns={
            ADVANTAGE: advantage,
            BEHAVIOUR: trajectory.behaviour_logprobs,
            NUM_COPIES: mask * num_copies,
        },
    )
