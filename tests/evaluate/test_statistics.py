"""Statistics against values worked out by hand or computed once with scipy 1.17."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lockstep.evaluate.statistics import (
    estimate_mean,
    incomplete_beta,
    mcnemar_exact,
    paired_t,
    sign_flip_test,
    student_t_quantile,
    student_t_tail,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("t", "degrees", "tail"),
    [
        (0.0, 3, 0.5),
        (1.0, 1, 0.25),
        (2.0, 2, 0.09175170953613697),
        (2.5, 7, 0.020496109292876444),
        (12.0, 30, 2.7900927075996303e-13),
    ],
)
def test_student_t_tail(t: float, degrees: int, tail: float) -> None:
    assert student_t_tail(t, degrees) == pytest.approx(tail, rel=1e-9, abs=0)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706204736432095), (4, 2.7764451051977987), (29, 2.045229642132703)],
)
def test_student_t_quantile(degrees: int, quantile: float) -> None:
    assert student_t_quantile(0.95, degrees) == pytest.approx(quantile, rel=1e-10)


def test_incomplete_beta_symmetry_and_known_value() -> None:
    assert incomplete_beta(0.3, 1, 1) == pytest.approx(0.3, rel=1e-14)
    assert incomplete_beta(0.2, 2, 5) == pytest.approx(1 - incomplete_beta(0.8, 5, 2), rel=1e-13)
    assert incomplete_beta(0.0, 2, 5) == 0.0
    assert incomplete_beta(1.0, 2, 5) == 1.0


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 10, 0.0, 0.27753279986288926),
        (10, 10, 0.7224672001371109, 1.0),
        (3, 17, 0.061911266376209945, 0.4102945856883412),
        (400, 1000, 0.37007478121137727, 0.4306905704857338),
    ],
)
def test_wilson_interval(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), rel=1e-12)


@pytest.mark.parametrize(
    ("only_a", "only_b", "p_value"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (3, 10, 0.09228515625),
        (50, 80, 0.010694055123829345),
        (2300, 2000, 5.079935568924055e-06),
    ],
)
def test_exact_mcnemar(only_a: int, only_b: int, p_value: float) -> None:
    assert mcnemar_exact(only_a, only_b).p_value == pytest.approx(p_value, rel=1e-10)


def test_paired_t() -> None:
    result = paired_t([0.2, -0.1, 0.5, 0.3, 0.0])
    assert result.statistic == pytest.approx(0.18 / (math.sqrt(0.057) / math.sqrt(5)))
    assert result.p_value == pytest.approx(0.16710331573259815)
    assert paired_t([0.0, 0.0]).p_value == 1.0
    assert paired_t([0.5, 0.5]).p_value == 0.0


def test_sign_flip_counts_every_pattern_when_few() -> None:
    # Of the 8 sign patterns of (1, 2, 3) only all plus and all minus reach |6|.
    assert sign_flip_test([1.0, 2.0, 3.0, 0.0]).p_value == 2 / 8
    # In one group the three flip together, so every pattern is as extreme as the observed one.
    assert sign_flip_test([1.0, 2.0, 3.0], groups=["g"] * 3).p_value == 1.0
    assert sign_flip_test([0.0, 0.0]).p_value == 1.0


def test_sign_flip_agrees_with_t_on_many_normal_differences() -> None:
    differences = np.random.default_rng(0).normal(0.2, 1.0, 200).tolist()
    assert sign_flip_test(differences).p_value == pytest.approx(
        paired_t(differences).p_value, abs=0.01
    )


def test_binary_scores_get_wilson_and_graded_scores_get_t() -> None:
    binary = estimate_mean([1.0] * 3 + [0.0] * 14)
    assert binary.method == "wilson"
    assert (binary.low, binary.high) == pytest.approx(wilson_interval(3, 17))
    assert binary.standard_error == pytest.approx(math.sqrt(3 / 17 * 14 / 17 / 17))

    graded = estimate_mean([0.0, 0.5, 1.0, 0.25, 0.75])
    assert graded.method == "t"
    error = math.sqrt(0.15625) / math.sqrt(5)
    assert graded.standard_error == pytest.approx(error)
    assert graded.high - graded.mean == pytest.approx(2.7764451051977987 * error)


def test_intervals_of_scores_stay_between_0_and_1() -> None:
    assert estimate_mean([0.0, 0.0, 0.0, 0.1]).low == 0.0
    assert estimate_mean([1.0, 1.0, 1.0, 0.9]).high == 1.0
    assert math.isnan(estimate_mean([0.5]).standard_error)
    assert estimate_mean([0.0, 0.0, 3.0]).low < 0.0  # not scores of that kind


def test_copies_of_an_item_in_one_group_add_no_certainty() -> None:
    scores = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    alone = estimate_mean(scores)
    groups = [index for index in range(len(scores)) for _ in range(10)]
    copied = estimate_mean([score for score in scores for _ in range(10)], groups)
    assert copied.method == "clustered t"
    assert copied.num_groups == 8
    assert copied.standard_error == pytest.approx(alone.standard_error)


def test_groups_of_one_are_no_groups() -> None:
    scores = [1.0, 0.0, 1.0]
    assert estimate_mean(scores, ["a", "b", "c"]) == estimate_mean(scores)


def test_no_items_is_an_undefined_mean_not_an_error() -> None:
    assert math.isnan(estimate_mean([]).mean)
