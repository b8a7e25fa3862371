from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

Loader = Callable[[str], ModuleType]
TEXT = range(2215)


def test_fresh_prompts_share_no_beginning(load_benchmark: Loader) -> None:
    workload = load_benchmark("workload")
    prompts = [workload.fresh_prompt(TEXT, serial, 4096) for serial in range(100)]
    assert {len(prompt) for prompt in prompts} == {4096}
    assert len({prompt[0] for prompt in prompts}) == 100


def test_cached_prompts_share_exactly_what_is_to_be_cached(load_benchmark: Loader) -> None:
    workload, loop = load_benchmark("workload"), load_benchmark("worker_loop")
    case = workload.Case(kind="ttft", precision="bf16", prompt_tokens=1024, cached_tokens=960)
    first, second = (workload.cached_prompt(TEXT, serial, case) for serial in (1, 2))
    assert len(first) == len(second) == 1024
    assert loop.reusable(first, second) == 960
    assert loop.reusable(first, first) == 1023


def test_streams_are_distinct_and_the_same_in_every_batch(load_benchmark: Loader) -> None:
    workload = load_benchmark("workload")

    def streams(batch: int) -> list[list[int]]:
        case = workload.Case(kind="decode", precision="bf16", batch=batch, prompt_tokens=128)
        return workload.decode_prompts(TEXT, case)

    assert {len(stream) for stream in streams(32)} == {128}
    assert len({tuple(stream) for stream in streams(32)}) == 32
    assert streams(8) == streams(32)[:8]


def test_documents_change_from_step_to_step(load_benchmark: Loader) -> None:
    workload = load_benchmark("workload")
    steps = [workload.sft_documents(TEXT, step) for step in range(8)]
    assert {len(document) for step in steps for document in step} == {512}
    assert len({tuple(document) for step in steps for document in step}) == 32


def test_cases_follow_the_parts_asked_for(load_benchmark: Loader) -> None:
    workload = load_benchmark("workload")
    cases = workload.cases_of(workload.PARTS, workload.PRECISIONS)
    assert len({case.key for case in cases}) == len(cases)
    assert {case.precision for case in cases if case.is_training} == {"bf16", "fp32"}
    long = workload.cases_of(["long"], ["int8"])
    assert [case.title for case in long] == ["decode, 1 stream at 8,000 tokens"]


def test_limits_follow_from_the_model_and_the_machine(load_benchmark: Loader) -> None:
    limits, case = load_benchmark("limits"), load_benchmark("workload").Case
    shape = limits.ModelShape(
        hidden=576, intermediate=1536, layers=30, q_size=576, kv_size=192, vocabulary=49152
    )
    assert shape.weight_bytes("bf16") == 2 * 134_479_872
    assert shape.weight_bytes("int4") == 134_479_872 * 4.5 / 8
    rates = {"fp32": 2e11, "bf16": 4e11, "int8": 8e11}
    machine = limits.Machine(flops_per_s=rates, bytes_per_s=lambda size: 35e9)

    def limit(kind: str, precision: str = "bf16", **sizes: Any) -> float:
        return limits.limit_of(case(kind=kind, precision=precision, **sizes), shape, machine)

    # Memory binds one stream, arithmetic binds many; figures as in a hand calculation.
    short = {"prompt_tokens": 128}
    assert limit("decode", **short) == pytest.approx(35e9 / (269e6 + 3.7e6), rel=0.01)
    assert limit("decode", prompt_tokens=8000) == pytest.approx(35e9 / (269e6 + 185e6), rel=0.01)
    assert limit("decode", batch=32, **short) == pytest.approx(4e11 / 0.28e9, rel=0.02)
    assert limit("decode", "int4", **short) == pytest.approx(35e9 / (75.6e6 + 3.7e6), rel=0.01)
    assert limit("prefill", prompt_tokens=512) == pytest.approx(4e11 / 0.23e9, rel=0.02)
    assert limit("prefill", "int8", prompt_tokens=512) == pytest.approx(8e11 / 0.23e9, rel=0.02)
    cached = limit("ttft", prompt_tokens=1024, cached_tokens=960)
    assert cached == pytest.approx(64 * (0.212e9 + 0.0686e9) / 4e11 * 1000, rel=0.05)
    assert limit("lora") == pytest.approx(4e11 / 0.62e9, rel=0.02)
    assert limit("full") == pytest.approx(4e11 / 0.86e9, rel=0.02)
    assert limit("decode", "shipped", **short) is None
    assert limit("memory") is None


def test_what_the_machine_answered_is_found_by_size(load_benchmark: Loader) -> None:
    limits = load_benchmark("limits")
    machine = limits.machine_of({"flops_per_s": {"bf16": 4e11}, "bytes_per_s": {"100": 2e10}})
    assert machine.bytes_per_s(100) == 2e10
