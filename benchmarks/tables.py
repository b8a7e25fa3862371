"""From all runs to their tables: terminal and README.md. A row is a case, a column a system."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import OURS, Result, Row, Spread, models_of, rows_of, runs_of
from rich.table import Table
from systems import COLUMNS
from workload import (
    CACHED_TOKENS,
    COMPARED_TOKENS,
    GENERATED_TOKENS,
    LOWER_IS_BETTER,
    MANY_STREAMS,
    MANY_STREAMS_TOKENS,
    PROMPT_TOKENS,
    TTFT_TOKENS,
)

START, END = "<!-- bench:start -->", "<!-- bench:end -->"


def cells(row: Row, systems: Sequence[str]) -> list[str]:
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    share = row.share_of_limit(OURS)
    return [
        f"{row.case.title}, {row.case.unit}",
        row.case.precision,
        *(spread_cell(row.speeds[name]) if name in row.speeds else "" for name in systems),
        ratio,
        "" if share is None else f"{share:.0%}",
    ]


def spread_cell(spread: Spread) -> str:
    """The median, and half the distance from lowest to highest."""
    value = spread.median
    text = f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return f"{text} ±{spread.share:.0%}" if spread.share else text


def header(systems: Sequence[str]) -> list[str]:
    return ["", "precision", *systems, "ours / best peer", "of the limit"]


def systems_of(rows: Sequence[Row]) -> list[str]:
    present = {name for row in rows for name in row.speeds}
    return [name for name in COLUMNS if name in present]


def terminal_table(result: Result, model: str) -> Table:
    rows = rows_of(result, model)
    systems = systems_of(rows)
    table = Table(title=caption(result, model))
    for number, name in enumerate(header(systems)):
        table.add_column(name, justify="left" if number < 2 else "right")
    for row in rows:
        table.add_row(*cells(row, systems))
    return table


def markdown(result: Result) -> str:
    """What stands between the markers of README.md."""
    sections = []
    for model in models_of(result):
        rows = rows_of(result, model)
        systems = systems_of(rows)
        head = header(systems)
        lines = [caption(result, model), ""]
        lines += [_line(head), _line(["---"] * 2 + ["--:"] * (len(head) - 2))]
        lines += [_line(cells(row, systems)) for row in rows]
        sections.append("\n".join([*lines, "", *footnotes(result, model)]))
    return "\n\n".join([*sections, legend()])


def caption(result: Result, model: str) -> str:
    runs = runs_of(result, model).values()
    last = list(runs)[-1]
    commits = ", ".join(dict.fromkeys(_commit(run) for run in runs))
    dates = " to ".join(dict.fromkeys([min(_dates(runs)), max(_dates(runs))]))
    return (
        f"{model} on {last['hardware']['cpu_model']}, {last['threads']} threads, {dates}, "
        f"commit {commits}: median of {last['rounds']} interleaved rounds ±half the range."
    )


def footnotes(result: Result, model: str) -> list[str]:
    """Versions, the machine's limits, agreement, and what is missing."""
    runs = list(runs_of(result, model).values())
    versions = {
        f"{package} {version}": None
        for run in runs
        for name, about in run["systems"].items()
        if name != OURS
        for package, version in about["versions"].items()
    }
    machine = runs[-1]["machine"]
    reading = ", ".join(
        f"{int(size) / 1e6:,.0f} MB at {rate / 1e9:.0f} GB/s"
        for size, rate in sorted(machine["bytes_per_s"].items(), key=lambda item: int(item[0]))
    )
    products = ", ".join(
        f"{kind} {rate / 1e9:,.0f} G/s" for kind, rate in machine["flops_per_s"].items()
    )
    lines = [f"Peers: {', '.join(sorted(versions))}."]
    limits = f"products of 512 rows, {products}"
    lines.append(f"Measured limits: {limits}{f'; reading {reading}' if reading else ''}.")
    if agreement := _agreement(runs):
        lines.append(
            f"Greedy streams of 8 whose first {COMPARED_TOKENS} tokens are ours at that precision: "
            f"{agreement}."
        )
    missing = {
        f"{entry['system']} {entry['precision']} ({entry['reason']})": None
        for run in runs
        for entry in run["missing"]
    }
    if missing:
        lines.append(f"Missing: {'; '.join(missing)}.")
    return lines


def legend() -> str:
    lower = ", ".join(sorted(LOWER_IS_BETTER))
    return (
        f"Less is better in {lower}, there a ratio below 1 is a win; ratios are between "
        "measurements of one run. All weights come from the shipped file, dequantised, and are "
        "quantised by each system's own tools; `shipped` is the file as it is. Decoding is greedy, "
        f"{PROMPT_TOKENS} tokens of prompt and {GENERATED_TOKENS} generated a stream "
        f"({MANY_STREAMS_TOKENS} at {MANY_STREAMS} streams), timed from the first token on. "
        f"`{CACHED_TOKENS} cached` is a prompt of {TTFT_TOKENS:,} tokens of which an earlier one "
        "had the rest. The limit is the time to read or compute what the task needs, at the rates "
        "measured in the same run."
    )


def write_between_markers(page: Path, text: str) -> None:
    """Replace what stands between the markers; they must be there, once."""
    before, start, rest = page.read_text().partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{page} has no {START} followed by {END}; add both lines")
    page.write_text(f"{before}{START}\n{text}\n{END}{after}")


def _agreement(runs: Sequence[dict[str, Any]]) -> str:
    latest = {(e["precision"], e["system"]): e for run in runs for e in run["agreement"]}
    return ", ".join(
        f"{system} {precision} {entry['identical']} of {entry['streams']}"
        for (precision, system), entry in latest.items()
    )


def _dates(runs: Any) -> list[str]:
    return [run["date"] for run in runs]


def _commit(run: dict[str, Any]) -> str:
    revision = run["git"] or {"commit": "unknown", "dirty": False}
    return str(revision["commit"][:7]) + (" with changes" if revision["dirty"] else "")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
