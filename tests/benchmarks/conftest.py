from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load_benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import benchmarks/<name>.py as its scripts do: the folder is on the path, in no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def result() -> dict[str, Any]:
    """Two runs of one model as side_by_side.py writes them; the second is faster by half."""

    def sample(run: str, system: str, number: int, value: float, **case: Any) -> dict[str, Any]:
        about = {"kind": "prefill", "precision": "bf16", "batch": 1, "cached_tokens": 0}
        about |= {"prompt_tokens": 512} | case
        return about | {"run": run, "system": system, "round": number, "value": value}

    def run(day: str, limits: dict[str, float], missing: list[dict[str, str]]) -> dict[str, Any]:
        return {
            "model": "SmolLM2-135M-Instruct",
            "date": day,
            "git": {"commit": "0123456789abcdef", "dirty": False},
            "hardware": {"cpu_model": "A CPU"},
            "threads": 2,
            "rounds": 3,
            "systems": {"llama.cpp": {"versions": {"llama-cpp-python": "0.3.36"}, "notes": ""}},
            "machine": {"bytes_per_s": {"269000000": 35e9}, "flops_per_s": {"bf16": 4e11}},
            "limits": limits,
            "agreement": [
                {"system": "llama.cpp", "precision": "bf16", "streams": 8, "identical": 7}
            ],
            "missing": missing,
        }

    ttft = {"kind": "ttft", "prompt_tokens": 1024, "cached_tokens": 960}
    memory = {"kind": "memory", "precision": "int8", "prompt_tokens": 0}
    return {
        "runs": {
            "first": run("2026-11-29", {"prefill, 512 tokens, bf16": 2000.0}, []),
            "second": run(
                "2026-11-30",
                {"prefill, 512 tokens, bf16": 3000.0, "first token of 1,024, 960 cached, bf16": 20},
                [{"system": "vLLM", "precision": "bf16", "reason": "it did not start"}],
            ),
        },
        "samples": [
            *(sample("first", "Lockstep", n, v) for n, v in enumerate((1000, 900, 1200))),
            *(sample("first", "llama.cpp", n, v) for n, v in enumerate((800, 700, 800))),
            *(sample("second", "Lockstep", n, v) for n, v in enumerate((1500, 1400, 1600))),
            *(sample("second", "OpenVINO", n, v) for n, v in enumerate((2000, 2000, 2000))),
            sample("second", "Lockstep", 1, 40.0, **ttft),
            sample("second", "OpenVINO", 1, 80.0, **ttft),
            sample("second", "llama.cpp", 1, 160.0, **ttft),
            sample("second", "llama.cpp", 1, 283.0, **memory),
        ],
    }
