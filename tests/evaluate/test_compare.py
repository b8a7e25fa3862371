from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lockstep.core.errors import DataError
from lockstep.evaluate.compare import compare
from lockstep.evaluate.results import ItemResult
from lockstep.evaluate.statistics import mcnemar_exact


def results_of(scores: list[float], **fields) -> list[ItemResult]:
    return [
        ItemResult(item_id=f"item {i}", prompt=f"question {i}", expected="x", score=score, **fields)
        for i, score in enumerate(scores)
    ]


def test_binary_scores_use_mcnemar() -> None:
    a = results_of([1.0] * 10 + [0.0] * 20)
    b = results_of([1.0] * 8 + [0.0] * 2 + [1.0] * 12 + [0.0] * 8)
    comparison = compare(a, b)
    assert (comparison.wins, comparison.losses, comparison.ties) == (12, 2, 16)
    assert comparison.test == mcnemar_exact(2, 12)
    assert comparison.difference.mean == pytest.approx(1 / 3)
    assert comparison.difference.low > 0


def test_a_difference_has_an_interval_even_when_b_always_wins() -> None:
    always = compare(results_of([0.0] * 30), results_of([1.0] * 30)).difference
    assert (always.mean, always.method) == (1.0, "agresti-min")
    assert 0.8 < always.low < always.high <= 1.0
    once = compare(results_of([0.0] * 10), results_of([1.0] + [0.0] * 9)).difference
    assert once.low < 0 < once.high


def test_agresti_min_interval_by_hand() -> None:
    a = results_of([1.0] * 10 + [0.0] * 20)
    b = results_of([1.0] * 8 + [0.0] * 2 + [1.0] * 12 + [0.0] * 8)
    difference = compare(a, b).difference
    half = 1.959963984540054 * math.sqrt(12.5 + 2.5 - 10**2 / 32) / 32
    assert difference.low == pytest.approx(10 / 32 - half)
    assert difference.high == pytest.approx(10 / 32 + half)


def test_order_does_not_matter() -> None:
    a, b = results_of([1.0, 0.0, 0.0, 1.0]), results_of([1.0, 1.0, 1.0, 0.0])
    assert compare(a, b) == compare(a, b[::-1])


def test_graded_scores_use_sign_flips() -> None:
    comparison = compare(results_of([0.1, 0.2, 0.3]), results_of([0.2, 0.4, 0.6]), metric="score")
    assert comparison.test.name == "sign-flip permutation"
    assert comparison.test.p_value == 2 / 8


def test_groups_flip_together() -> None:
    a = results_of([0.0] * 6, group="one document")
    comparison = compare(a, results_of([1.0] * 6, group="one document"))
    assert comparison.test.p_value == 1.0


def test_other_items_are_refused() -> None:
    with pytest.raises(DataError, match="1 only in A, 0 only in B, 2 in both"):
        compare(results_of([1.0, 0.0, 1.0]), results_of([1.0, 0.0]))


def test_other_prompts_are_refused_but_other_tokens_are_counted() -> None:
    a = results_of([1.0, 0.0, 1.0])
    changed = [a[0], replace(a[1], prompt="another question"), a[2]]
    with pytest.raises(DataError, match="1 of 3 items were asked with another prompt"):
        compare(a, changed)
    retokenised = [a[0], replace(a[1], prompt_token_ids=(1, 2)), a[2]]
    assert compare(a, retokenised).num_other_tokens == 1


def test_an_unknown_metric_names_the_known_ones() -> None:
    a = results_of([1.0], metrics={"acc_norm": 1.0})
    assert compare(a, a, metric="acc_norm").ties == 1
    with pytest.raises(DataError, match="has no metric 'f1'; it has accuracy, score, acc_norm"):
        compare(a, a, metric="f1")
