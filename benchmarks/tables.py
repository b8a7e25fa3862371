"""From the samples of a run to its table (medians, spread, ratios): terminal and README.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table
from workload import GENERATED_TOKENS, MANY_STREAMS, MANY_STREAMS_TOKENS, PROMPT_TOKENS

START, END = "<!-- bench:start -->", "<!-- bench:end -->"
OURS = "Lockstep"
PEERS = ("llama.cpp", "transformers")
RAW = "Lockstep, model alone"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Tokens/s over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=median(values), low=min(values), high=max(values))

    def __str__(self) -> str:
        return f"{_number(self.median)} ({_number(self.low)}-{_number(self.high)})"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One task at one precision."""

    title: str
    precision: str
    speeds: dict[str, Spread]
    limit: float | None

    @property
    def ratio(self) -> float | None:
        """Our median over the best peer's."""
        peers = [self.speeds[name].median for name in PEERS if name in self.speeds]
        return self.speeds[OURS].median / max(peers) if peers and OURS in self.speeds else None

    @property
    def share_of_limit(self) -> float | None:
        if self.limit is None or OURS not in self.speeds:
            return None
        return self.speeds[OURS].median / self.limit

    def cells(self, systems: Sequence[str]) -> list[str]:
        speeds = [str(self.speeds[name]) if name in self.speeds else "" for name in systems]
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        share = "" if self.share_of_limit is None else f"{self.share_of_limit:.0%}"
        return [self.title, self.precision, *speeds, ratio, share]


def rows_of(result: dict[str, Any]) -> list[Row]:
    """In the order in which the run met its cases."""
    speeds: dict[tuple[str, str], dict[str, list[float]]] = {}
    for sample in result["samples"]:
        key = (sample["title"], sample["precision"])
        by_system = speeds.setdefault(key, {})
        rate = sample["num_tokens"] / sample["seconds"]
        by_system.setdefault(sample["system"], []).append(rate)
    return [
        Row(
            title=title,
            precision=precision,
            speeds={name: Spread.of(values) for name, values in by_system.items()},
            limit=result["limits_tokens_per_s"].get(f"{title}, {precision}"),
        )
        for (title, precision), by_system in speeds.items()
    ]


def header(systems: Sequence[str]) -> list[str]:
    return ["tokens/s", "precision", *systems, "ours / best peer", "of the limit"]


def systems_of(rows: Sequence[Row]) -> list[str]:
    present = {name for row in rows for name in row.speeds}
    return [name for name in (OURS, RAW, *PEERS) if name in present]


def terminal_table(result: dict[str, Any]) -> Table:
    rows = rows_of(result)
    systems = systems_of(rows)
    table = Table(title=caption(result))
    for number, name in enumerate(header(systems)):
        table.add_column(name, justify="left" if number < 2 else "right")
    for row in rows:
        table.add_row(*row.cells(systems))
    return table


def markdown(result: dict[str, Any]) -> str:
    """What stands between the markers of README.md."""
    rows = rows_of(result)
    systems = systems_of(rows)
    head = header(systems)
    lines = [caption(result), "", _line(head), _line(["---"] * 2 + ["--:"] * (len(head) - 2))]
    lines += [_line(row.cells(systems)) for row in rows]
    return "\n".join([*lines, "", *footnotes(result)])


def caption(result: dict[str, Any]) -> str:
    revision = result["git"] or {"commit": "unknown", "dirty": False}
    commit = revision["commit"][:7] + (" with changes" if revision["dirty"] else "")
    return (
        f"{result['model']} on {result['hardware']['cpu_model']}, {result['threads']} threads, "
        f"{result['date']}, commit {commit}: tokens/s, median of {result['rounds']} interleaved "
        "rounds (lowest-highest)."
    )


def footnotes(result: dict[str, Any]) -> list[str]:
    machine, versions = result["machine"], result["versions"]
    peers = sorted({f"{k} {v}" for name in PEERS for k, v in versions.get(name, {}).items()})
    reading = ", ".join(f"{k} {v / 1e9:.0f} GB/s" for k, v in machine["bytes_per_s"].items())
    flops = ", ".join(f"{k} {v / 1e9:.0f} GFLOP/s" for k, v in machine["flops_per_s"].items())
    lines = [
        f"Peers: {', '.join(peers)}. All have the same weights, but for q4_1, which is the file "
        "as shipped.",
        f"Decoding is greedy, {PROMPT_TOKENS} tokens of prompt and {GENERATED_TOKENS} generated a "
        f"stream ({MANY_STREAMS_TOKENS} at {MANY_STREAMS} streams), timed from the first token on.",
        f"The limit is what must be read or computed at the rates torch reaches here: reading the "
        f"weights' size, {reading}; products of 512 rows, {flops}.",
    ]
    agreement = [
        f"{entry['system']} {entry['identical']} of {entry['streams']}"
        for entry in result["agreement"]
        if entry["precision"] == "fp32"
    ]
    if agreement:
        lines.append(
            "Streams that agree with ours to the last token in fp32, at the largest batch: "
            f"{', '.join(agreement)}."
        )
    return lines


def write_between_markers(page: Path, text: str) -> None:
    """Replace what stands between the markers; they must be there, once."""
    before, start, rest = page.read_text().partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{page} has no {START} followed by {END}; add both lines")
    page.write_text(f"{before}{START}\n{text}\n{END}{after}")


def load_result(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
