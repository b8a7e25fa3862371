"""Evaluations as tables on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from lockstep.evaluate.compare import Comparison
from lockstep.evaluate.results import Summary
from lockstep.evaluate.statistics import Estimate


def print_summary(summary: Summary) -> None:
    """Each metric with its error, then what the completions were like."""
    table = Table(
        "metric", "mean", "std. error", "95% interval", "method", box=None, padding=(0, 2)
    )
    for name, estimate in summary.estimates.items():
        table.add_row(
            name,
            f"{estimate.mean:.4f}",
            f"{estimate.standard_error:.4f}",
            _interval(estimate),
            _method(estimate),
        )
    console = Console(highlight=False)
    console.print(f"{summary.model} on {summary.task}", markup=False, soft_wrap=True)
    console.print(table)
    samples = f", {summary.num_samples} samples" if summary.num_samples > summary.num_items else ""
    console.print(
        f"{summary.num_items} items{samples}; "
        f"{summary.mean_prompt_tokens:.1f} prompt and {summary.mean_completion_tokens:.1f} "
        f"completion tokens on average; {summary.truncated_share:.1%} truncated, "
        f"{summary.unanswered_share:.1%} without an answer",
        soft_wrap=True,
    )


def print_comparison(comparison: Comparison) -> None:
    """Means, difference, wins and losses, and the test."""
    table = Table("", comparison.metric, box=None, padding=(0, 2))
    difference = comparison.difference
    table.add_row("A", f"{comparison.mean_a:.4f}")
    table.add_row("B", f"{comparison.mean_b:.4f}")
    table.add_row("B - A", f"{difference.mean:+.4f}")
    table.add_row("95% interval", _interval(difference, signed=True))
    table.add_row(
        "B wins, loses, ties", f"{comparison.wins}, {comparison.losses}, {comparison.ties}"
    )
    table.add_row(comparison.test.name, f"p = {comparison.test.p_value:.3g}")
    console = Console(highlight=False)
    console.print(f"{comparison.num_items} paired items")
    console.print(table)
    if comparison.num_other_tokens:
        console.print(
            f"note: {comparison.num_other_tokens} prompts have other token ids in B than in A "
            "(another tokenizer or chat template)",
            soft_wrap=True,
        )


def _interval(estimate: Estimate, *, signed: bool = False) -> str:
    form = "+.4f" if signed else ".4f"
    return f"{estimate.low:{form}} to {estimate.high:{form}}"


def _method(estimate: Estimate) -> str:
    if estimate.num_groups < estimate.num_items:
        return f"{estimate.method}, {estimate.num_groups} groups"
    return estimate.method
