from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from time import sleep
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Loader = Callable[[str], ModuleType]

WORKER = """
    import os, sys
    from worker_loop import UnsupportedError, serve

    def add(a, b):
        print("a library that prints")
        return {"sum": a + b}

    def load(arguments):
        if arguments.precision == "int3":
            raise UnsupportedError("no int3 here")
        return {"add": add, "fail": lambda: sys.exit("it broke")}

    serve(load)
"""


@pytest.fixture
def start(
    load_benchmark: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    process = load_benchmark("worker_process")
    monkeypatch.setattr(process, "HERE", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    (tmp_path / "adder.py").write_text(textwrap.dedent(WORKER))

    def make(precision: str = "fp32") -> Any:
        return process.Worker(
            "adder",
            python=Path(sys.executable),
            model=Path("m"),
            precision=precision,
            threads=1,
            log=tmp_path / "log",
        )

    return make


def becomes_stopped(pid: int) -> bool:
    for _ in range(100):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        sleep(0.01)
    return False


def test_a_worker_answers_and_is_stopped_in_between(start: Callable[..., Any]) -> None:
    with start() as worker:
        for number in range(3):
            assert worker.ask("add", a=number, b=1) == {"sum": number + 1}
            assert becomes_stopped(worker.pid)
        assert worker.peak_rss_bytes > 1 << 20
    assert worker.has_ended


def test_a_worker_that_dies_says_why(start: Callable[..., Any], load_benchmark: Loader) -> None:
    error = load_benchmark("worker_process").WorkerError
    with start() as worker, pytest.raises(error, match=r"adder fp32 ended with 1: it broke"):
        worker.ask("fail")


def test_a_precision_a_system_lacks_is_told_from_a_failure(
    start: Callable[..., Any], load_benchmark: Loader
) -> None:
    with pytest.raises(load_benchmark("worker_process").MissingError, match="no int3 here"):
        start("int3")
