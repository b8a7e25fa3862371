from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Loader = Callable[[str], ModuleType]
MODEL = "SmolLM2-135M-Instruct"


def test_ratios_are_between_samples_of_one_run(
    load_benchmark: Loader, result: dict[str, Any]
) -> None:
    prefill = load_benchmark("results").rows_of(result, MODEL)[0]
    assert prefill.ratios == pytest.approx({"llama.cpp": 1000 / 800, "OpenVINO": 1500 / 2000})
    assert (prefill.best_peer, prefill.ratio) == ("OpenVINO", pytest.approx(0.75))
    ours = prefill.speeds["Lockstep"]
    assert (ours.median, ours.low, ours.high) == (1500, 1400, 1600)
    assert ours.share == pytest.approx(200 / 3000)
    assert prefill.share_of_limit("Lockstep") == pytest.approx(1500 / 3000)
    assert prefill.share_of_limit("llama.cpp") == pytest.approx(800 / 2000)


def test_less_is_better_in_times_and_sizes(load_benchmark: Loader, result: dict[str, Any]) -> None:
    _, ttft, memory = load_benchmark("results").rows_of(result, MODEL)
    assert (ttft.best_peer, ttft.ratio) == ("OpenVINO", pytest.approx(0.5))
    assert ttft.share_of_limit("Lockstep") == pytest.approx(0.5)
    assert (memory.best_peer, memory.ratio) == (None, None)
    assert memory.share_of_limit("llama.cpp") is None


def test_a_run_takes_the_place_of_what_it_wrote_before(
    load_benchmark: Loader, result: dict[str, Any], tmp_path: Path
) -> None:
    results = load_benchmark("results")
    path = tmp_path / "new/result.json"
    merged = results.load_result(path)
    for count in (1, 2):
        samples = [{"system": "Lockstep", "value": n} for n in range(count)]
        merged = results.merge(merged, "a", {"model": "m"}, samples)
        results.write_result(path, merged)
    merged = results.merge(merged, "b", {"model": "m"}, [{"system": "vLLM", "value": 3}])
    assert [(s["run"], s["value"]) for s in merged["samples"]] == [("a", 0), ("a", 1), ("b", 3)]
    assert list(merged["runs"]) == ["a", "b"]
    assert len(results.load_result(path)["samples"]) == 2
    path.write_text(json.dumps({"samples": []}))
    with pytest.raises(ValueError, match="older form"):
        results.load_result(path)


def test_bars_are_multiples_of_the_best_peer(
    load_benchmark: Loader, result: dict[str, Any], tmp_path: Path
) -> None:
    plots = load_benchmark("plots")
    prefill, ttft, _ = load_benchmark("results").rows_of(result, MODEL)
    assert plots.multiples(prefill) == pytest.approx(
        {"Lockstep": 0.75, "OpenVINO": 1.0, "llama.cpp": 0.6}
    )
    assert plots.multiples(ttft) == pytest.approx(
        {"Lockstep": 2.0, "OpenVINO": 1.0, "llama.cpp": 0.5}
    )
    drawn = plots.plot(result, MODEL, tmp_path)
    assert drawn.read_bytes().startswith(b"\x89PNG")
