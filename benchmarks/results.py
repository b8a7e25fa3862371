"""The JSON of all runs, and what its samples say: medians, spread, ratios.

    {"runs": {run id: {date, git, model, hardware, limits, ...}}, "samples": [{run, system, ...}]}

A campaign may be measured in several calls, each a run of its own. Two systems are compared only by
samples of one run: a ratio comes from the latest run that has both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from workload import LOWER_IS_BETTER, Case

OURS = "Lockstep"
_CASE_FIELDS = ("kind", "precision", "batch", "prompt_tokens", "cached_tokens")

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One system's measurements of one case in one run, in the case's unit."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=median(values), low=min(values), high=max(values))

    @property
    def share(self) -> float:
        """Half the distance from lowest to highest, over the median."""
        return (self.high - self.low) / (2 * self.median)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, from every run that measured it."""

    case: Case
    by_run: Mapping[str, Mapping[str, Spread]]
    """run id, then system; runs in the order in which they were made"""
    limits: Mapping[str, float]
    """of the runs that know one"""

    def latest(self, *systems: str) -> str | None:
        """The last run that measured all of them."""
        runs = [run for run, found in self.by_run.items() if all(s in found for s in systems)]
        return runs[-1] if runs else None

    @property
    def speeds(self) -> dict[str, Spread]:
        """Each system's latest; a peer's is preferred from a run that measured us as well."""
        systems = dict.fromkeys(name for found in self.by_run.values() for name in found)
        chosen = {name: self.latest(OURS, name) or self.latest(name) for name in systems}
        return {name: self.by_run[run][name] for name, run in chosen.items() if run is not None}

    @property
    def ratios(self) -> dict[str, float]:
        """Our median over each peer's, both of one run."""
        found = {}
        for name in self.speeds:
            run = self.latest(OURS, name)
            if name != OURS and run is not None:
                found[name] = self.by_run[run][OURS].median / self.by_run[run][name].median
        return found

    @property
    def best_peer(self) -> str | None:
        """The peer we do worst against."""
        ratios = self.ratios
        worst = max if self.case.unit in LOWER_IS_BETTER else min
        return worst(ratios, key=ratios.__getitem__) if ratios else None

    @property
    def ratio(self) -> float | None:
        """Ours over the best peer's; below 1 is better where the unit is a time or a size."""
        return None if self.best_peer is None else self.ratios[self.best_peer]

    def share_of_limit(self, system: str) -> float | None:
        """How much of what the machine allows was reached, in the same run."""
        run = self.latest(system)
        if run is None or run not in self.limits:
            return None
        share = self.by_run[run][system].median / self.limits[run]
        return 1 / share if self.case.unit in LOWER_IS_BETTER else share


def load_result(path: Path) -> Result:
    """What is there; an empty result where nothing is."""
    if not path.exists():
        return {"runs": {}, "samples": []}
    result: Result = json.loads(path.read_text())
    if "runs" not in result:
        raise ValueError(f"{path} is of an older form; move it away")
    return result


def merge(result: Result, run: str, record: Mapping[str, Any], samples: Iterable[Any]) -> Result:
    """`result` with this run in it, in place of what it held of the same run."""
    others = [sample for sample in result["samples"] if sample["run"] != run]
    return {
        "runs": {name: each for name, each in result["runs"].items() if name != run}
        | {run: dict(record)},
        "samples": others + [{"run": run, **sample} for sample in samples],
    }


def write_result(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.rename(path)


def models_of(result: Result) -> list[str]:
    return list(dict.fromkeys(run["model"] for run in result["runs"].values()))


def runs_of(result: Result, model: str) -> dict[str, Any]:
    return {name: run for name, run in result["runs"].items() if run["model"] == model}


def rows_of(result: Result, model: str) -> list[Row]:
    """In the order of the table."""
    runs = runs_of(result, model)
    values: dict[Case, dict[str, dict[str, list[float]]]] = {}
    for sample in result["samples"]:
        if sample["run"] not in runs:
            continue
        case = Case(**{name: sample[name] for name in _CASE_FIELDS})
        by_system = values.setdefault(case, {}).setdefault(sample["run"], {})
        by_system.setdefault(sample["system"], []).append(sample["value"])
    rows = [
        Row(
            case=case,
            by_run={
                run: {name: Spread.of(each) for name, each in by_run[run].items()}
                for run in runs
                if run in by_run
            },
            limits={
                run: record["limits"][case.key]
                for run, record in runs.items()
                if case.key in record["limits"]
            },
        )
        for case, by_run in values.items()
    ]
    return sorted(rows, key=lambda row: row.case.order)
