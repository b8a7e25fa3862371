"""The end of the demo on a terminal: before and after, speed, and which promises were kept."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from lockstep.core.progress import format_seconds
from lockstep.demo.outcome import Outcome
from lockstep.evaluate.compare import Comparison
from lockstep.evaluate.results import Summary
from lockstep.evaluate.statistics import Estimate

WORDS = {"base_sft": "base to SFT", "sft_rl": "SFT to RL", "base_rl": "base to RL"}


def print_outcome(outcome: Outcome, folder: Path) -> None:
    console = Console(highlight=False)
    console.print()
    console.print(_accuracies(outcome))
    console.print()
    console.print(_comparisons(outcome))
    console.print()
    console.print(_speeds(outcome))
    console.print()
    for check in outcome.checks:
        mark = "[green]kept  [/green]" if check.is_kept else "[bold red]BROKEN[/bold red]"
        console.print(f"{mark}  {check.promise}: {check.finding}", soft_wrap=True)
    report = folder / "report.html"
    console.print(f"\ntotal {format_seconds(outcome.total_s)}; report: {report}", soft_wrap=True)
    if not outcome.is_success:
        num_broken = sum(not check.is_kept for check in outcome.checks)
        console.print(f"[bold red]{num_broken} of {len(outcome.checks)} promises broken[/bold red]")


def _accuracies(outcome: Outcome) -> Table:
    table = _table("% right (95% interval)", "base", "after SFT", "after RL")
    models = [outcome.measured[name] for name in ("base", "sft", "rl")]
    table.add_row(_named("held-out task", models[0].task), *(_mean(m.task) for m in models))
    table.add_row(_named("multiple choice", models[0].choices), *(_mean(m.choices) for m in models))
    return table


def _comparisons(outcome: Outcome) -> Table:
    table = _table("paired test", "points (95% interval)", "won, lost, tied", "p")
    for key, words in WORDS.items():
        _add_comparison(table, f"held-out task, {words}", outcome.comparisons[key])
    _add_comparison(table, f"multiple choice, {WORDS['base_rl']}", outcome.choices["base_rl"])
    return table


def _speeds(outcome: Outcome) -> Table:
    speed = outcome.speed
    table = _table("speed", "")
    table.add_row("SFT", f"{speed.sft_tokens_per_s:,.0f} tokens/s")
    table.add_row("RL", f"{speed.rl_s_per_step:.1f} s/step")
    table.add_row("RL rollouts", f"{speed.rollout_tokens_per_s:,.0f} drawn tokens/s")
    num = outcome.agreement.num_answers - 1
    table.add_row(f"server, {num} at once", f"{speed.server_tokens_per_s:,.0f} drawn tokens/s")
    table.add_row("first token of the first request", f"{1000 * speed.first_token_s:.0f} ms")
    return table


def _add_comparison(table: Table, name: str, comparison: Comparison) -> None:
    table.add_row(
        name,
        _points(comparison.difference),
        f"{comparison.wins}, {comparison.losses}, {comparison.ties}",
        f"{comparison.test.p_value:.2g}",
    )


def _named(name: str, summary: Summary) -> str:
    return f"{name}, {summary.num_items}"


def _mean(summary: Summary) -> str:
    accuracy = summary.accuracy
    mean, low, high = (100 * value for value in (accuracy.mean, accuracy.low, accuracy.high))
    return f"{mean:.1f} ({low:.1f}-{high:.1f})"


def _points(difference: Estimate) -> str:
    return (
        f"{100 * difference.mean:+.1f} "
        f"({100 * difference.low:+.1f} to {100 * difference.high:+.1f})"
    )


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="right")
    return table
