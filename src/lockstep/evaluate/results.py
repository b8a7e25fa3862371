"""What an evaluation leaves on disk: a JSONL record an item, and a summary of nothing else.

`results.jsonl` holds the prompt's token ids and the completion's, so a score can be traced to what
was asked and answered; `summary.json` can be recomputed from it. Scores are in [0, 1].
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.errors import DataError
from lockstep.core.files import write_json, write_text
from lockstep.evaluate.jsonl import read_records
from lockstep.evaluate.statistics import Estimate, estimate_mean

RESULTS_FILE = "results.jsonl"
SUMMARY_FILE = "summary.json"


@dataclass(frozen=True, kw_only=True)
class ItemResult:
    """One item, asked and graded."""

    item_id: str
    sample_index: int = 0
    prompt: Any
    """Messages or text, before the model's chat template."""
    prompt_token_ids: tuple[int, ...] = ()
    """What the model read; empty where only continuations were scored."""
    completion: str = ""
    token_ids: tuple[int, ...] = ()
    answer: str | None = None
    expected: str
    score: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further per-item scores, such as acc_norm."""
    finish_reason: str = ""
    group: str | None = None
    error: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        return self.item_id, self.sample_index

    def metric(self, name: str) -> float:
        """`accuracy` (1 for a fully right answer), `score`, or one of `metrics`."""
        if name == "accuracy":
            return float(self.score >= 1.0)
        if name == "score":
            return self.score
        if name not in self.metrics:
            known = ", ".join(["accuracy", "score", *self.metrics])
            raise DataError(f"item {self.item_id} has no metric {name!r}; it has {known}")
        return self.metrics[name]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """An evaluation in numbers; `estimates` by metric, always with accuracy and score."""

    task: str
    model: str
    num_items: int
    num_samples: int
    estimates: Mapping[str, Estimate]
    mean_prompt_tokens: float
    mean_completion_tokens: float
    truncated_share: float
    """Completions that ended at max_tokens."""
    unanswered_share: float
    """Completions from which no answer could be extracted."""
    num_failed: int
    """Grades that a verifier could not give; they count as wrong."""

    @property
    def accuracy(self) -> Estimate:
        return self.estimates["accuracy"]


def summarise(results: Sequence[ItemResult], *, task: str, model: str) -> Summary:
    """Means over `results`; errors are clustered by group, or by item if sampled twice."""
    groups = clusters(results)
    extra = sorted({name for result in results for name in result.metrics})
    num = max(len(results), 1)
    return Summary(
        task=task,
        model=model,
        num_items=len({result.item_id for result in results}),
        num_samples=len(results),
        estimates={
            name: estimate_mean([result.metric(name) for result in results], groups)
            for name in ["accuracy", "score", *extra]
        },
        mean_prompt_tokens=sum(len(result.prompt_token_ids) for result in results) / num,
        mean_completion_tokens=sum(len(result.token_ids) for result in results) / num,
        truncated_share=sum(result.finish_reason == "length" for result in results) / num,
        unanswered_share=sum(result.answer is None for result in results) / num,
        num_failed=sum(result.error is not None for result in results),
    )


def clusters(results: Sequence[ItemResult]) -> list[Hashable] | None:
    """Cluster label of each result; None when all are independent."""
    labels: list[Hashable] = [result.group or ("item", result.item_id) for result in results]
    return labels if len(set(labels)) < len(labels) else None


def write_results(folder: Path, results: Sequence[ItemResult], summary: Summary) -> None:
    lines = [json.dumps(asdict(result), ensure_ascii=False) for result in results]
    write_text(folder / RESULTS_FILE, "".join(f"{line}\n" for line in lines))
    write_json(folder / SUMMARY_FILE, _without_nan(asdict(summary)))


def read_results(folder: Path) -> list[ItemResult]:
    """The records of an evaluation folder, in order."""
    path = folder / RESULTS_FILE
    if not path.is_file():
        raise DataError(
            f"{folder} holds no {RESULTS_FILE}; give a folder that `lockstep eval` wrote"
        )
    results = []
    for number, record in read_records(path):
        try:
            result = ItemResult(**record)
        except TypeError as error:
            raise DataError(f"{path}:{number} is not an evaluation record: {error}") from error
        results.append(result)
    return results


def _without_nan(value: Any) -> Any:
    """JSON has no nan; an error that cannot be estimated is null there."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
