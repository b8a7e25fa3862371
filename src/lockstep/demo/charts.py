"""The report's plots as SVG text that can stand inside an HTML page.

No global matplotlib state; text stays text, in the page's fonts. Each function takes plain numbers.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

GREY, BLUE, GREEN = "#8a94a3", "#3567b5", "#12805c"
COLOURS = {"base": GREY, "sft": BLUE, "rl": GREEN}
NAMES = {"base": "base", "sft": "after SFT", "rl": "after RL"}
STYLE: Any = {  # matplotlib types its keys as literals
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": "#1c2430",
    "axes.edgecolor": "#c4cad3",
    "axes.labelcolor": "#4b5563",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8ebef",
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}
Row = Mapping[str, Any]


def loss_curve(rows: Sequence[Row]) -> str:
    """SFT loss by step."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure("step", "loss (nats per token)")
        steps, losses = _columns(rows, "step", "loss")
        axes.plot(steps, losses, color=BLUE, marker="o", markersize=3)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        alt = f"SFT loss over {len(steps)} steps, from {losses[0]:.2f} to {losses[-1]:.2f}."
        return _svg(figure, "loss", alt)


def reward_curve(rows: Sequence[Row]) -> str:
    """RL's mean reward by step, and held-out accuracy with its interval where it was measured."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure("step", "share of right answers")
        steps, rewards = _columns(rows, "step", "reward")
        axes.plot(steps, rewards, color=GREY, marker="o", markersize=2.5, label="reward, sampled")
        at, accuracy = _columns(rows, "step", "eval/accuracy")
        _, low = _columns(rows, "step", "eval/accuracy_low")
        _, high = _columns(rows, "step", "eval/accuracy_high")
        axes.fill_between(at, low, high, color=GREEN, alpha=0.15, linewidth=0)
        axes.plot(at, accuracy, color=GREEN, marker="o", markersize=4, label="held-out, greedy")
        axes.set_ylim(0, 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="upper left", ncols=2)
        alt = (
            f"RL reward over {len(steps)} steps, from {rewards[0]:.2f} to {rewards[-1]:.2f}; "
            f"held-out accuracy from {accuracy[0]:.2f} to {accuracy[-1]:.2f}."
        )
        return _svg(figure, "reward", alt)


def accuracy_bars(estimates: Mapping[str, Row], *, title: str) -> str:
    """One bar a model with its 95% interval."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure("", "accuracy (%)")
        for place, (name, estimate) in enumerate(estimates.items()):
            mean, low, high = (100 * estimate[key] for key in ("mean", "low", "high"))
            axes.bar(place, mean, width=0.58, color=COLOURS[name])
            error = [[mean - low], [high - mean]]
            axes.errorbar(place, mean, yerr=error, color="#1c2430", capsize=4, linewidth=1.2)
            axes.text(place, high + 2, f"{mean:.1f}", ha="center", va="bottom", weight="bold")
        axes.set_xticks(range(len(estimates)), [NAMES[name] for name in estimates])
        axes.grid(visible=False, axis="x")
        axes.set_ylim(0, 112)
        axes.set_yticks(range(0, 101, 25))
        means = ", ".join(f"{NAMES[n]} {100 * e['mean']:.1f}%" for n, e in estimates.items())
        return _svg(figure, title, f"{title}: {means}, each with its 95% interval.")


def phase_bars(seconds: Mapping[str, float]) -> str:
    """Time of each phase, first on top."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure("seconds", "", size=(9.6, 2.9))
        names = list(seconds)
        axes.barh(names, list(seconds.values()), color=BLUE, height=0.6)
        longest = max(seconds.values())
        for place, value in enumerate(seconds.values()):
            axes.text(value + longest * 0.008, place, f"{value:.1f}", va="center")
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, longest * 1.07)
        alt = "Seconds by phase: " + ", ".join(f"{n} {s:.1f}" for n, s in seconds.items()) + "."
        return _svg(figure, "phases", alt)


def _columns(rows: Sequence[Row], *names: str) -> tuple[list[float], ...]:
    """Values of several columns, from the rows that have them all."""
    full = [row for row in rows if all(name in row for name in names)]
    return tuple([float(row[name]) for row in full] for name in names)


def _figure(x: str, y: str, *, size: tuple[float, float] = (4.8, 2.9)) -> tuple[Figure, Any]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def _svg(figure: Figure, name: str, alt: str) -> str:
    """The picture without XML prologue, metadata and fixed size; `alt` says what it shows."""
    text = io.StringIO()
    # Identifiers must differ between the pictures of a page, and not between two runs.
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True)
    svg = re.sub(r"<metadata>.*?</metadata>", "", text.getvalue(), flags=re.DOTALL)
    svg = svg[svg.index("<svg") :]
    (size,) = re.findall(r'viewBox="[^"]+"', svg)[:1]
    head = f'<svg {size} role="img" aria-label="{escape(alt)}">'
    # Inside HTML the parser knows the namespaces; xlink:href is spelled href there.
    return re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1).replace("xlink:href", "href")
