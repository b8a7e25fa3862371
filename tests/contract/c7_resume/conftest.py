"""`lockstep` runs as real processes, killed by SIGKILL, and what is compared of what they leave."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.main import run
from lockstep.core.files import sha256_of
from lockstep.core.run_folder import read_metrics


class KillableRuns:
    """Processes forked from one that has only imported the package."""

    def start(self, arguments: Sequence[str]) -> BaseProcess:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lockstep.train.sft", "lockstep.rl.run"])
        process = context.Process(target=run, args=(list(arguments),))
        process.start()
        return process

    def finish(self, arguments: Sequence[str]) -> None:
        process = self.start(arguments)
        process.join(timeout=100)
        assert process.exitcode == 0

    def kill_and_resume(
        self, arguments: Sequence[str], out: Path, *, kills: int, steps: int, delay_s: float
    ) -> None:
        """Kill the run `kills` times, each up to `steps` steps and `delay_s` seconds further on;
        then let it finish.
        """
        dice = random.Random()  # another instant every time: what a failure prints repeats it
        for _ in range(kills):
            further, wait_s = dice.randrange(0, steps), dice.uniform(0.0, delay_s)
            print(f"kill after {further} steps and {wait_s:.4f} s")
            target = _last_step(out) + further
            process = self.start([*arguments, "--out", str(out), "--resume"])
            while process.is_alive() and _last_step(out) < target:
                time.sleep(0.001)
            time.sleep(wait_s)
            process.kill()
            process.join()
        self.finish([*arguments, "--out", str(out), "--resume"])

    def digests(self, out: Path, *patterns: str) -> dict[str, str]:
        """Hashes of exported weights, and of every file that matches one of `patterns`."""
        files = [
            file
            for pattern in ("model/*.safetensors", "adapter/*.safetensors", *patterns)
            for file in out.glob(pattern)
        ]
        return {str(file.relative_to(out)): sha256_of(file) for file in files}

    def metrics(self, out: Path, *, clocks: Sequence[str]) -> list[dict[str, Any]]:
        """All rows, without the metrics that tell the time of day, as it were."""
        rows = read_metrics(out / "metrics.jsonl")
        return [{key: row[key] for key in row if key not in clocks} for row in rows]


def _last_step(out: Path) -> int:
    path = out / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    return rows[-1]["step"] if rows else 0


@pytest.fixture
def runs() -> KillableRuns:
    return KillableRuns()
