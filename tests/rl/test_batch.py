from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lockstep.rl.batch import make_batch, token_advantages
from lockstep.rl.config import AlgorithmConfig
from lockstep.rl.loss import ADVANTAGE, BEHAVIOUR, NUM_COPIES


@pytest.fixture
def rollouts(make_trajectory):
    return [
        make_trajectory(reward=1.0, drawn=2, group="a"),
        make_trajectory(reward=0.0, drawn=4, group="a"),
        make_trajectory(reward=1.0, drawn=8, group="b"),
        make_trajectory(reward=1.0, drawn=8, group="b"),
    ]


@pytest.mark.parametrize(
    ("loss", "weights", "normaliser"),
    [
        ("grpo", [1 / 2, 1 / 4], 4),
        ("dapo", [1, 1], 2 + 4 + 8 + 8),
        ("dr_grpo", [1 / 16, 1 / 16], 4),
    ],
)
def test_aggregations(rollouts, loss, weights, normaliser) -> None:
    batch = make_batch(rollouts, AlgorithmConfig(loss=loss), max_tokens=16)
    assert batch.normaliser == normaliser
    assert batch.num_without_advantage == 2  # group b taught nothing but still counts
    for document, weight in zip(batch.documents, weights, strict=True):
        assert set(np.asarray(document.loss_weights)) == {np.float32(0), np.float32(weight)}


def test_kl_keeps_rollouts_without_advantage(rollouts) -> None:
    batch = make_batch(rollouts, AlgorithmConfig(kl_beta=0.1), max_tokens=16)
    assert batch.num_trained == 4
    assert batch.num_without_advantage == 0


def test_equal_rollouts_are_computed_once_with_the_weight_of_all(rollouts) -> None:
    config = AlgorithmConfig(kl_beta=0.1, loss="grpo")
    (_, _, both) = make_batch(rollouts, config, max_tokens=16).documents
    assert list(both.loss_weights) == [0] * 3 + [np.float32(2 / 8)] * 8
    assert list(both.columns[NUM_COPIES]) == [0] * 3 + [2] * 8
    bits = np.nextafter(np.float32(-1.5), np.float32(0)).item()
    other = replace(rollouts[3], behaviour_logprobs=(0.0,) * 3 + (-1.5,) * 7 + (bits,))
    assert len(make_batch([*rollouts[:3], other], config, max_tokens=16).documents) == 4


def test_columns_are_aligned_with_tokens(rollouts) -> None:
    (first, _) = make_batch(rollouts, AlgorithmConfig(loss="dr_grpo"), max_tokens=16).documents
    assert list(first.columns[ADVANTAGE]) == [0, 0, 0, 0.5, 0.5]
    assert list(first.columns[BEHAVIOUR]) == [0, 0, 0, -1.5, -1.5]


def test_failed_rollouts_count_nowhere(rollouts, make_trajectory) -> None:
    failed = make_trajectory(reward=0.0, group="b", status="failed")
    with_failed = make_batch([*rollouts, failed], AlgorithmConfig(), max_tokens=16)
    without = make_batch(rollouts, AlgorithmConfig(), max_tokens=16)
    assert with_failed.normaliser == without.normaliser
    assert len(with_failed.documents) == len(without.documents)
    assert with_failed.num_masked == 1


def test_truncated_rollouts_can_be_masked_but_still_set_the_baseline(make_trajectory) -> None:
    rollouts = [
        make_trajectory(reward=1.0, drawn=2),
        make_trajectory(reward=0.0, drawn=4, status="truncated"),
    ]
    batch = make_batch(rollouts, AlgorithmConfig(mask_truncated=True), max_tokens=4)
    assert batch.num_masked == 1
    assert batch.normaliser == 2
    assert batch.documents[0].columns[ADVANTAGE][-1] > 0


def test_a_batch_that_teaches_nothing_is_empty(make_trajectory) -> None:
    batch = make_batch([make_trajectory(reward=0.0)] * 4, AlgorithmConfig(), max_tokens=4)
    assert batch.documents == []
    assert batch.normaliser > 0


def test_reinforce_plus_plus_discounts_towards_the_first_token(make_trajectory) -> None:
    config = AlgorithmConfig(advantage="reinforce_plus_plus", gamma=0.5)
    rollouts = [make_trajectory(reward=1.0, drawn=3), make_trajectory(reward=0.0, drawn=3)]
    good, bad = token_advantages(rollouts, config)
    assert good[:3].tolist() == [0.0, 0.0, 0.0]
    assert good[3] < good[4] < good[5]
    assert len(set(bad[3:].tolist())) == 1
