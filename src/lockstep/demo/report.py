"""report.html: one self-contained page, made of nothing but files of the demo's folder.

Every figure and table names the file its numbers came from. No script, no font, no picture is
loaded from elsewhere. The page itself is report.html.jinja.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from lockstep.core.files import write_text
from lockstep.core.progress import format_seconds
from lockstep.core.run_folder import read_metrics
from lockstep.demo import charts
from lockstep.demo.outcome import SUMMARY

MODELS = ("base", "sft", "rl")
NUM_EXAMPLES = 6
PAIRS = {"base_sft": "base to SFT", "sft_rl": "SFT to RL", "base_rl": "base to RL"}


def write_report(folder: Path) -> Path:
    """Make `folder`/report.html from what else is in the folder."""
    path = folder / "report.html"
    write_text(path, render_report(folder))
    return path


def render_report(folder: Path) -> str:
    summary = _read(folder / SUMMARY)
    settings = _read(folder / "config.json")["settings"]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"duration": format_seconds, "interval": _interval, "points": _points}
    return environment.get_template("report.html.jinja").render(
        summary=summary,
        settings=settings,
        environment=_read(folder / "environment.json"),
        models=MODELS,
        names=charts.NAMES,
        pairs=PAIRS,
        plots=_plots(folder, summary),
        examples=_examples(folder),
        answers=read_metrics(folder / "server/answers.jsonl"),
    )


def _plots(folder: Path, summary: dict[str, Any]) -> dict[str, str]:
    def estimates(what: str) -> dict[str, Any]:
        measured = summary["measured"]
        return {name: measured[name][what]["estimates"]["accuracy"] for name in MODELS}

    return {
        "task": charts.accuracy_bars(estimates("task"), title="Held-out accuracy on the task"),
        "choices": charts.accuracy_bars(estimates("choices"), title="Multiple-choice accuracy"),
        "loss": charts.loss_curve(read_metrics(folder / "sft/metrics.jsonl")),
        "reward": charts.reward_curve(read_metrics(folder / "rl/metrics.jsonl")),
        "phases": charts.phase_bars(summary["phase_seconds"]),
    }


def _examples(folder: Path) -> list[dict[str, Any]]:
    """The first held-out items, as each model answered them: none is picked by hand."""
    results = {
        name: read_metrics(folder / "measurements" / name / "task/results.jsonl")[:NUM_EXAMPLES]
        for name in MODELS
    }
    return [
        {
            "question": _text(results["base"][index]["prompt"]),
            "expected": results["base"][index]["expected"],
            "answers": [
                {
                    "text": results[name][index]["completion"],
                    "is_right": results[name][index]["score"] >= 1.0,
                }
                for name in MODELS
            ],
        }
        for index in range(len(results["base"]))
    ]


def _text(prompt: str | Sequence[dict[str, str]]) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def _interval(estimate: dict[str, Any]) -> str:
    low, high = 100 * estimate["low"], 100 * estimate["high"]
    return f"{low:.1f} to {high:.1f}"


def _points(estimate: dict[str, Any]) -> str:
    mean, low, high = (100 * estimate[key] for key in ("mean", "low", "high"))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"
