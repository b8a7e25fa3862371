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
    """A run of three rounds as side_by_side.py writes it."""

    def sample(title: str, precision: str, system: str, round_: int, seconds: float) -> dict:
        return {
            "title": title,
            "precision": precision,
            "system": system,
            "round": round_,
            "num_tokens": 512,
            "seconds": seconds,
        }

    times = {
        "Lockstep": (0.5, 0.4, 0.6),
        "llama.cpp": (0.6, 0.5, 0.8),
        "transformers": (1.0, 1.0, 2.0),
    }
    samples = [
        sample("prefill, 512 tokens", "bf16", system, number, seconds)
        for system, all_seconds in times.items()
        for number, seconds in enumerate(all_seconds)
    ]
    samples.append(sample("decode, 8 streams", "q4_1", "llama.cpp", 1, 2.0))
    samples += [sample("decode, 8 streams", "fp32", "Lockstep", 1, 4.0)]
    samples += [sample("decode, 8 streams", "fp32", "llama.cpp", 1, 2.0)]
    return {
        "model": "SmolLM2-135M-Instruct",
        "date": "2026-11-30",
        "git": {"commit": "0123456789abcdef", "dirty": False},
        "hardware": {"cpu_model": "A CPU"},
        "versions": {"Lockstep": {"torch": "2.13.0"}, "llama.cpp": {"llama-cpp-python": "0.3.36"}},
        "notes": {},
        "threads": 2,
        "rounds": 3,
        "machine": {"bytes_per_s": {"bf16": 35e9}, "flops_per_s": {"bf16": 4e11}},
        "limits_tokens_per_s": {"prefill, 512 tokens, bf16": 2048.0},
        "agreement": [
            {"system": "llama.cpp", "precision": "fp32", "streams": 8, "identical": 7},
        ],
        "seconds": 60.0,
        "samples": samples,
    }
