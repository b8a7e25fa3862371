"""Means with errors, and paired tests, for scores of language models.

Why a module of its own: an accuracy without an error bar invites wrong decisions, and scipy is too
large a dependency for four distributions. Sources: Wilson (1927) interval; cluster-robust standard
error and paired differences as in Miller, "Adding Error Bars to Evals" (2024); exact McNemar test
(binomial on discordant pairs) and Agresti and Min (2005) interval of its difference; sign-flip
permutation test (Fisher). Student's t through the regularised incomplete beta function, continued
fraction of Lentz (Numerical Recipes, 6.4).
Does not correct for multiple comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
EXACT_PERMUTATION_LIMIT = 16
NUM_PERMUTATIONS = 20_000

Method = Literal["wilson", "agresti-min", "t", "clustered t"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over items, its standard error and 95% confidence interval."""

    mean: float
    standard_error: float
    low: float
    high: float
    num_items: int
    num_groups: int
    """Number of clusters; equals `num_items` when items are independent."""
    method: Method


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """A two-sided test. `statistic` is what the test looks at; see the function that made it."""

    name: str
    statistic: float
    p_value: float


def estimate_mean(scores: Sequence[float], groups: Sequence[Hashable] | None = None) -> Estimate:
    """Mean of `scores`: Wilson's interval if all are 0 or 1, else Student's t; clustered by group.

    With groups, residuals are summed within each group before squaring, so that a hundred questions
    about one document count as little more than one; t has (groups - 1) degrees of freedom.
    """
    estimate = estimate_t(scores, groups)
    if estimate.num_groups < len(scores) or not scores or not is_binary(scores):
        return _within_unit_interval(estimate, scores)
    mean, num = estimate.mean, len(scores)
    low, high = wilson_interval(round(mean * num), num)
    error = math.sqrt(mean * (1.0 - mean) / num)
    return replace(estimate, standard_error=error, low=low, high=high, method="wilson")


def _within_unit_interval(estimate: Estimate, scores: Sequence[float]) -> Estimate:
    """Cut off what cannot be, where scores are from 0 to 1."""
    if not all(0.0 <= score <= 1.0 for score in scores):
        return estimate
    return replace(estimate, low=max(estimate.low, 0.0), high=min(estimate.high, 1.0))


def estimate_paired_difference(
    differences: Sequence[float], groups: Sequence[Hashable] | None = None
) -> Estimate:
    """Mean of paired differences; Agresti-Min's interval if all are -1, 0 or 1 and none grouped.

    That interval adds half a pair to each cell of the two-by-two table (Agresti and Min 2005), so
    it has a width even when B wins everywhere.
    """
    estimate = estimate_t(differences, groups)
    is_binary_pair = all(difference in (-1.0, 0.0, 1.0) for difference in differences)
    if estimate.num_groups < len(differences) or not differences or not is_binary_pair:
        return estimate
    num = len(differences) + 2
    wins = sum(difference > 0 for difference in differences) + 0.5
    losses = sum(difference < 0 for difference in differences) + 0.5
    centre = (wins - losses) / num
    half = _z() * math.sqrt(wins + losses - (wins - losses) ** 2 / num) / num
    return replace(
        estimate, low=max(centre - half, -1.0), high=min(centre + half, 1.0), method="agresti-min"
    )


def estimate_t(scores: Sequence[float], groups: Sequence[Hashable] | None = None) -> Estimate:
    """Mean with Student's t interval; nan where there is too little to say."""
    values = np.asarray(scores, dtype=np.float64)
    num = len(values)
    mean = float(values.mean()) if num else math.nan
    clusters = _cluster_sums(values - mean, groups)
    is_clustered = len(clusters) < num
    if len(clusters) < 2:
        error = half = math.nan
    else:
        square_sum = float(np.square(clusters).sum())
        error = math.sqrt(square_sum if is_clustered else square_sum * num / (num - 1)) / num
        half = student_t_quantile(CONFIDENCE, len(clusters) - 1) * error
    return Estimate(
        mean=mean,
        standard_error=error,
        low=mean - half,
        high=mean + half,
        num_items=num,
        num_groups=len(clusters),
        method="clustered t" if is_clustered else "t",
    )


def is_binary(scores: Sequence[float]) -> bool:
    return all(score in (0.0, 1.0) for score in scores)


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's score interval for a proportion: never empty, never outside [0, 1]."""
    z = _z()
    share = successes / trials
    scale = 1.0 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / scale
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return low, high


def mcnemar_exact(only_a: int, only_b: int) -> PairedTest:
    """Exact McNemar test from the discordant counts: items only A, and only B, got right.

    `statistic` is the smaller count; under no difference it is Binomial(only_a + only_b, 1/2).
    """
    num, small = only_a + only_b, min(only_a, only_b)
    term = total = 1
    for k in range(1, small + 1):
        term = term * (num - k + 1) // k
        total += term
    # Shift before dividing: 2**num overflows a float beyond 1,023 discordant pairs.
    p = _ratio_of_power_of_two(2 * total, num)
    return PairedTest(name="exact McNemar", statistic=float(small), p_value=min(1.0, p))


def paired_t(differences: Sequence[float]) -> PairedTest:
    """Paired t test that the mean difference is 0; `statistic` is t. No spread at all gives p 0."""
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < 2 or not values.any():
        return PairedTest(name="paired t", statistic=0.0, p_value=1.0)
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    if error == 0.0:
        return PairedTest(name="paired t", statistic=math.inf, p_value=0.0)
    t = float(values.mean()) / error
    return PairedTest(
        name="paired t", statistic=t, p_value=2 * student_t_tail(abs(t), len(values) - 1)
    )


def sign_flip_test(
    differences: Sequence[float], *, groups: Sequence[Hashable] | None = None, seed: int = 0
) -> PairedTest:
    """Permutation test that swaps A and B at random; `statistic` is the mean difference.

    All sign patterns if at most 16 differences are not 0, else 20,000 drawn ones, the observed one
    counted among them, so p is never 0. With groups, whole groups flip together.
    """
    values = np.asarray(differences, dtype=np.float64)
    sums = _cluster_sums(values, groups)
    sums = sums[sums != 0.0]
    observed = float(values.mean()) if len(values) else 0.0
    if len(sums) == 0:
        return PairedTest(name="sign-flip permutation", statistic=observed, p_value=1.0)
    # Sums that are equal in exact arithmetic may differ in the last bits; count them as ties.
    threshold = abs(float(sums.sum())) * (1 - 1e-12)
    if len(sums) <= EXACT_PERMUTATION_LIMIT:
        patterns = np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums)) & 1
        totals = np.abs((1 - 2 * patterns) @ sums)
        p = float((totals >= threshold).mean())
    else:
        rng = np.random.default_rng(seed)
        extreme = 1
        for _ in range(NUM_PERMUTATIONS // 1000):
            signs = rng.integers(0, 2, size=(1000, len(sums)), dtype=np.int8) * 2 - 1
            extreme += int((np.abs(signs @ sums) >= threshold).sum())
        p = extreme / (NUM_PERMUTATIONS + 1)
    return PairedTest(name="sign-flip permutation", statistic=observed, p_value=p)


def student_t_tail(t: float, degrees: float) -> float:
    """P(T > t) for t >= 0."""
    return 0.5 * incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)


def student_t_quantile(confidence: float, degrees: float) -> float:
    """The t for which P(|T| < t) is `confidence`, by bisection."""
    tail = (1 - confidence) / 2
    low, high = 0.0, 1.0
    while student_t_tail(high, degrees) > tail:
        low, high = high, high * 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_tail(middle, degrees) > tail else (low, middle)
    return (low + high) / 2


def incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b)."""
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - incomplete_beta(1.0 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    log_front += a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) * _beta_fraction(x, a, b) / a


def _beta_fraction(x: float, a: float, b: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1) or tiny)
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for step in (even, odd):
            d = 1.0 / (1.0 + step * d or tiny)
            c = 1.0 + step / c or tiny
            value *= c * d
        if abs(c * d - 1.0) < 1e-16:
            break
    return value


def _z() -> float:
    """Two-sided normal quantile of CONFIDENCE."""
    return NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


def _cluster_sums(values: Floats, groups: Sequence[Hashable] | None) -> Floats:
    """Sum of `values` within each group, in order of first appearance; `values` if not grouped."""
    if groups is None:
        return values
    numbers: dict[Hashable, int] = {}
    labels = [numbers.setdefault(group, len(numbers)) for group in groups]
    return np.bincount(labels, weights=values, minlength=len(numbers)).astype(np.float64)


def _ratio_of_power_of_two(numerator: int, exponent: int) -> float:
    excess = max(numerator.bit_length() - 64, 0)
    return math.ldexp(float(numerator >> excess), excess - exponent)
