"""The table as a picture: every system against the best peer, and our part of the limit."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results import OURS, Result, Row, rows_of
from systems import COLUMNS
from workload import LOWER_IS_BETTER

COLOURS = dict(zip(COLUMNS, mpl.color_sequences["tab10"], strict=False))
BAR_HEIGHT = 0.8
ROW_INCHES = 0.62
MOST = 4.0
"""Bars end here; the number beside one says how far it goes."""


def plot(result: Result, model: str, folder: Path) -> Path:
    """One PNG: left, bars as multiples of the best peer (longer is better); right, the limit."""
    rows = [row for row in rows_of(result, model) if row.best_peer is not None]
    figure = Figure(figsize=(12, 1.6 + ROW_INCHES * max(len(rows), 1)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    for place, row in enumerate(rows):
        _draw_multiples(left, place, row)
        _draw_share(right, place, row)
    left.set_yticks(range(len(rows)), [f"{r.case.title}  {r.case.precision}" for r in rows])
    left.invert_yaxis()
    left.margins(y=0.01)
    left.axvline(1, zorder=0, color="black", linewidth=0.8)
    longest = max((v for row in rows for v in multiples(row).values()), default=1.0)
    left.set_xlim(0, min(longest, MOST) * 1.12)
    left.set_xlabel("multiple of the best peer: speed, or its time or memory over each system's")
    right.set_xlim(0, 1.2)
    right.axvline(1, zorder=0, color="black", linewidth=0.8)
    right.xaxis.set_major_formatter("{x:.0%}")
    right.set_xlabel("of the measured limit")
    handles = {label: bar for bar, label in zip(*left.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    figure.suptitle(model)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"side_by_side-{model.lower()}.png"
    figure.savefig(path, dpi=110)
    return path


def multiples(row: Row) -> dict[str, float]:
    """Of the best peer, more being better in every unit; each from a run that has ours too."""
    assert row.ratio is not None
    lower = row.case.unit in LOWER_IS_BETTER
    ours = 1 / row.ratio if lower else row.ratio
    theirs = {name: ours * (r if lower else 1 / r) for name, r in row.ratios.items()}
    return {OURS: ours, **theirs}


def _draw_multiples(axes: Axes, place: int, row: Row) -> None:
    values = multiples(row)
    names = [name for name in COLUMNS if name in values]
    height = BAR_HEIGHT / len(names)
    for number, name in enumerate(names):
        y = place - BAR_HEIGHT / 2 + (number + 0.5) * height
        value = values[name]
        axes.barh(y, min(value, MOST), height * 0.92, color=COLOURS[name], label=name)
        if name == OURS:
            end = min(value, MOST) + 0.03
            axes.text(end, y, f"{value:.2f}", va="center", fontsize=7, weight="bold")


def _draw_share(axes: Axes, place: int, row: Row) -> None:
    names = [name for name in (OURS, row.best_peer) if name is not None]
    height = BAR_HEIGHT / len(names)
    for number, name in enumerate(names):
        share = row.share_of_limit(name)
        if share is not None:
            y = place - BAR_HEIGHT / 2 + (number + 0.5) * height
            axes.barh(y, share, height * 0.92, color=COLOURS[name])
            axes.text(share + 0.02, y, f"{share:.0%}", va="center", fontsize=7)
