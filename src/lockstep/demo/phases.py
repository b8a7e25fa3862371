"""The phases as the user sees them: a numbered header, bars below it, and a time for each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from lockstep.core.run_folder import RunFolder


class Phases:
    """Announces phases on stderr and writes a line a phase to the run's metrics.jsonl."""

    def __init__(self, folder: RunFolder, *, total: int) -> None:
        self._folder = folder
        self._total = total
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._started_s = time.perf_counter()
        self.seconds: dict[str, float] = {}
        """Of every finished phase, in order."""

    @contextmanager
    def phase(self, name: str, what: str) -> Iterator[None]:
        """One phase: `3/9 SFT: what`, and its time when it is left without an error."""
        number = len(self.seconds) + 1
        self._console.print(f"\n[bold]{number}/{self._total} {name}[/bold]: {what}")
        started_s = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started_s
        self._folder.append_metrics({"step": number, "phase": name, "seconds": self.seconds[name]})

    def say(self, text: str) -> None:
        """A line of result under the phase's bars."""
        self._console.print(f"  {text}", markup=False)

    @property
    def total_s(self) -> float:
        """Since the demo began."""
        return time.perf_counter() - self._started_s
