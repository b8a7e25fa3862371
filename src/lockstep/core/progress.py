"""How far a long job is: bars with rate and ETA on a terminal, a plain line now and then elsewhere.

    with Progress() as progress:
        task = progress.add("SFT", total=200, unit="steps")
        for ...:
            task.advance(note=f"loss {loss:.3f}")

Everything goes to stderr, so a command's output can be piped. In a log file or CI a task says a
line when it starts, one every ten seconds or so, and one when it is done.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.progress import Task as RichTask
from rich.text import Text

Item = TypeVar("Item")

SECONDS_BETWEEN_LINES = 10.0


class Task(Protocol):
    """One job among those a Progress shows."""

    def advance(self, amount: int = 1, *, note: str | None = None) -> None:
        """`amount` more units are done; `note` replaces the text shown behind the numbers."""

    def finish(self) -> None:
        """It is done, even if fewer units than announced were needed."""


class Progress:
    """A context manager that shows its tasks until it is left. `quiet` shows nothing."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._quiet = quiet
        self._bars: RichProgress | None = None
        if not quiet and self._stream.isatty():
            self._bars = _bars(self._stream)

    def add(self, description: str, *, total: int | None, unit: str = "items") -> Task:
        """Show one more task; `total` None means nobody knows how much there is."""
        if self._bars is not None:
            return _BarTask(self._bars, description, total=total, unit=unit)
        stream = None if self._quiet else self._stream
        return _LineTask(stream, self._clock, description, total=total, unit=unit)

    def track(
        self, items: Iterable[Item], description: str, *, total: int | None, unit: str = "items"
    ) -> Iterator[Item]:
        """Pass `items` through, one unit each."""
        task = self.add(description, total=total, unit=unit)
        for item in items:
            yield item
            task.advance()
        task.finish()

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False)
        elif not self._quiet:
            print(text, file=self._stream, flush=True)

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()


class _BarTask:
    def __init__(
        self, bars: RichProgress, description: str, *, total: int | None, unit: str
    ) -> None:
        self._bars = bars
        self._id = bars.add_task(description, total=total, unit=unit, note="")

    def advance(self, amount: int = 1, *, note: str | None = None) -> None:
        if note is None:
            self._bars.update(self._id, advance=amount)
        else:
            self._bars.update(self._id, advance=amount, note=note)

    def finish(self) -> None:
        task = self._bars.tasks[self._id]
        self._bars.update(self._id, total=task.completed)


class _LineTask:
    def __init__(
        self,
        stream: TextIO | None,
        clock: Callable[[], float],
        description: str,
        *,
        total: int | None,
        unit: str,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._description = description
        self._total = total
        self._unit = unit
        self._done = 0
        self._note = ""
        self._finished = False
        self._started_s = self._last_line_s = clock()
        self._print(f"{description}: {f'{total} {unit}' if total is not None else 'started'}")

    def advance(self, amount: int = 1, *, note: str | None = None) -> None:
        self._done += amount
        self._note = self._note if note is None else note
        if self._done == self._total:
            self.finish()
        elif self._clock() - self._last_line_s >= SECONDS_BETWEEN_LINES:
            self._last_line_s = self._clock()
            self._print(self._state())

    def finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._print(self._state())

    def _state(self) -> str:
        elapsed_s = self._clock() - self._started_s
        rate = self._done / elapsed_s if elapsed_s > 0 else 0.0
        count = f"{self._done}" if self._total is None else f"{self._done}/{self._total}"
        parts = [f"{count} {self._unit}"]
        if rate > 0:
            parts.append(format_rate(rate, self._unit))
        if self._finished:
            parts.append(f"done in {format_seconds(elapsed_s)}")
        elif self._total is not None and rate > 0:
            parts.append(f"{format_seconds((self._total - self._done) / rate)} left")
        if self._note:
            parts.append(self._note)
        return f"{self._description}: " + ", ".join(parts)

    def _print(self, text: str) -> None:
        if self._stream is not None:
            print(text, file=self._stream, flush=True)


class _RateColumn(TextColumn):
    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: RichTask) -> Text:
        speed = task.finished_speed or task.speed
        return Text(format_rate(speed, task.fields["unit"]) if speed else "")


def _bars(stream: TextIO) -> RichProgress:
    return RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        _RateColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}", markup=False),
        console=Console(file=stream),
    )


def format_rate(per_s: float, unit: str) -> str:
    """Units a second, or seconds a unit where that reads better."""
    return (
        f"{per_s:,.1f} {unit}/s" if per_s >= 1 else f"{1 / per_s:,.1f} s/{unit.removesuffix('s')}"
    )


def format_seconds(seconds: float) -> str:
    """`8 s`, `2 min 5 s` or `1 h 2 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
