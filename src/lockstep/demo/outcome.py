"""What a demo found, and whether it kept what the README promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.run_folder import read_metrics
from lockstep.demo.agreement import Agreement
from lockstep.demo.measuring import Measured
from lockstep.demo.streaming import StreamedAnswer
from lockstep.evaluate.compare import Comparison

SUMMARY = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One promise. A demo with a broken one exits 1."""

    promise: str
    is_kept: bool
    finding: str


@dataclass(frozen=True, kw_only=True)
class FirstRatios:
    """Ratios of trainer to engine at the first update after each rollout, over the whole RL run."""

    num_tokens: int
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Rates of this one run, on a machine that may have had other work."""

    sft_tokens_per_s: float
    """Prompt and answer, forward and backward."""
    rl_s_per_step: float
    rollout_tokens_per_s: float
    """Drawn tokens alone."""
    server_tokens_per_s: float
    """Drawn tokens of all concurrent requests, HTTP included."""
    first_token_s: float
    """Of the streamed answer, HTTP included; it is the server's first request."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything the table and the report say; summary.json in the demo's folder."""

    measured: Mapping[str, Measured]
    """By model: base, sft, rl."""
    comparisons: Mapping[str, Comparison]
    """Paired tests on the task, by `before_after`."""
    choices: Mapping[str, Comparison]
    """The same on multiple choice."""
    first_ratios: FirstRatios
    agreement: Agreement
    streamed: StreamedAnswer
    server_exit_code: int
    speed: Speed
    phase_seconds: Mapping[str, float]
    total_s: float
    checks: tuple[Check, ...]

    @property
    def is_success(self) -> bool:
        return all(check.is_kept for check in self.checks)


def first_ratios(rl_folder: Path) -> FirstRatios:
    rows = _steps(rl_folder)
    return FirstRatios(
        num_tokens=round(sum(row["sampling/num_tokens"] for row in rows)),
        low=min(row["sampling/importance_sampling_ratio/min"] for row in rows),
        high=max(row["sampling/importance_sampling_ratio/max"] for row in rows),
    )


def speed(
    sft_folder: Path, rl_folder: Path, *, server_tokens_per_s: float, first_token_s: float
) -> Speed:
    """Rates out of the runs' metrics, and the server's beside them."""
    sft, rl = _steps(sft_folder), _steps(rl_folder)
    num_drawn = sum(
        row["completions/mean_length"] * (row["num_rollouts/all"] - row["num_rollouts/failed"])
        for row in rl
    )
    return Speed(
        sft_tokens_per_s=sft[-1]["num_tokens"] / sum(row["step_time"] for row in sft),
        rl_s_per_step=sum(row["step_time"] for row in rl) / len(rl),
        rollout_tokens_per_s=num_drawn / sum(row["time/rollout"] for row in rl),
        server_tokens_per_s=server_tokens_per_s,
        first_token_s=first_token_s,
    )


def check_promises(
    *,
    improvement: Comparison,
    regression: Comparison,
    ratios: FirstRatios,
    agreement: Agreement,
    exit_code: int,
    significance: float,
) -> tuple[Check, ...]:
    """`improvement` is RL over SFT on the task, `regression` RL over base on multiple choice."""
    rl_p, choices_p = improvement.test.p_value, regression.test.p_value
    return (
        Check(
            promise=f"RL raises held-out accuracy over SFT (paired test, p < {significance:g})",
            is_kept=improvement.difference.mean > 0 and rl_p < significance,
            finding=f"{100 * improvement.difference.mean:+.1f} points, p = {rl_p:.2g}",
        ),
        Check(
            promise=f"common knowledge is not lost (no drop with p < {significance:g})",
            is_kept=not (regression.difference.mean < 0 and choices_p < significance),
            finding=f"{100 * regression.difference.mean:+.1f} points, p = {choices_p:.2g}",
        ),
        Check(
            promise="the trainer's first ratio is exactly 1.0 for every token",
            is_kept=ratios.low == ratios.high == 1.0,
            finding=f"{_span(ratios.low, ratios.high)} over {ratios.num_tokens:,} tokens",
        ),
        Check(
            promise="max |logprob(trainer) - logprob(server)| is exactly 0",
            is_kept=agreement.max_difference == 0.0 and agreement.num_tokens > 0,
            finding=f"{agreement.max_difference:g} over {agreement.num_tokens:,} tokens of "
            f"{agreement.num_answers} answers",
        ),
        Check(
            promise="the server shuts down cleanly",
            is_kept=exit_code == 0,
            finding=f"exit code {exit_code}",
        ),
    )


def _span(low: float, high: float) -> str:
    return f"{low}" if low == high else f"{low} to {high}"


def _steps(folder: Path) -> list[dict[str, Any]]:
    """Rows of optimizer steps; a measurement before the first has none of their columns."""
    return [row for row in read_metrics(folder / "metrics.jsonl") if "step_time" in row]
