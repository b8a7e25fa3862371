"""Is B better than A? A paired comparison of two evaluations of the same items.

Pairing removes the variance between items, which usually exceeds the difference sought. Binary
scores: exact McNemar test and Agresti-Min interval of the difference. Graded scores, or items in
groups: sign-flip permutation test, and Student's t on the paired differences, clustered by group.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.errors import DataError
from lockstep.evaluate.results import ItemResult, clusters, read_results
from lockstep.evaluate.statistics import (
    Estimate,
    PairedTest,
    estimate_paired_difference,
    is_binary,
    mcnemar_exact,
    sign_flip_test,
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """B against A on one metric; differences are B - A."""

    metric: str
    num_items: int
    mean_a: float
    mean_b: float
    difference: Estimate
    wins: int
    """Items on which B scored higher."""
    losses: int
    ties: int
    test: PairedTest
    num_other_tokens: int
    """Items of equal text whose prompt tokens differ (another tokenizer or chat template)."""


def compare_folders(folder_a: Path, folder_b: Path, *, metric: str = "accuracy") -> Comparison:
    return compare(read_results(folder_a), read_results(folder_b), metric=metric)


def compare(
    results_a: Sequence[ItemResult], results_b: Sequence[ItemResult], *, metric: str = "accuracy"
) -> Comparison:
    """Pair by item and sample; DataError if the items or their prompts are not the same."""
    a_of, b_of = ({result.key: result for result in results} for results in (results_a, results_b))
    _require_same_items(a_of, b_of)
    pairs = [(a_of[key], b_of[key]) for key in a_of]
    scores_a = [a.metric(metric) for a, _ in pairs]
    scores_b = [b.metric(metric) for _, b in pairs]
    differences = [b - a for a, b in zip(scores_a, scores_b, strict=True)]
    wins = sum(difference > 0 for difference in differences)
    losses = sum(difference < 0 for difference in differences)
    groups = clusters([a for a, _ in pairs])
    if groups is None and is_binary(scores_a) and is_binary(scores_b):
        test = mcnemar_exact(losses, wins)
    else:
        test = sign_flip_test(differences, groups=groups)
    return Comparison(
        metric=metric,
        num_items=len(pairs),
        mean_a=sum(scores_a) / len(pairs),
        mean_b=sum(scores_b) / len(pairs),
        difference=estimate_paired_difference(differences, groups),
        wins=wins,
        losses=losses,
        ties=len(pairs) - wins - losses,
        test=test,
        num_other_tokens=sum(
            list(a.prompt_token_ids) != list(b.prompt_token_ids) for a, b in pairs
        ),
    )


def _require_same_items(
    a_of: dict[tuple[str, int], ItemResult], b_of: dict[tuple[str, int], ItemResult]
) -> None:
    only_a, only_b = len(a_of.keys() - b_of.keys()), len(b_of.keys() - a_of.keys())
    if only_a or only_b:
        raise DataError(
            f"the evaluations are not of the same items: {only_a} only in A, {only_b} only in B, "
            f"{len(a_of.keys() & b_of.keys())} in both; run both with the same task, seed and "
            "number of items"
        )
    if not a_of:
        raise DataError("the evaluations hold no items")
    changed = sum(_as_json(a_of[key].prompt) != _as_json(b_of[key].prompt) for key in a_of)
    if changed:
        raise DataError(
            f"{changed} of {len(a_of)} items were asked with another prompt in B than in A; "
            "run both with the same system prompt, template and style"
        )


def _as_json(value: object) -> str:
    return json.dumps(value, sort_keys=True)
