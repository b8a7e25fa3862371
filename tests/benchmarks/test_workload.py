from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

Loader = Callable[[str], ModuleType]


def test_prefill_prompts_share_no_beginning(load_benchmark: Loader) -> None:
    workload = load_benchmark("workload")
    prompts = [workload.prefill_prompt(range(2215), serial) for serial in range(100)]
    assert {len(prompt) for prompt in prompts} == {512}
    assert len({prompt[0] for prompt in prompts}) == 100


def test_streams_are_distinct_and_the_same_in_every_batch(load_benchmark: Loader) -> None:
    workload = load_benchmark("workload")
    streams = workload.decode_prompts(range(2215), 32)
    assert {len(stream) for stream in streams} == {128}
    assert len({tuple(stream) for stream in streams}) == 32
    assert workload.decode_prompts(range(2215), 8) == streams[:8]


def test_limits_follow_from_the_model_and_the_machine(load_benchmark: Loader) -> None:
    limits, case = load_benchmark("limits"), load_benchmark("workload").Case
    shape = limits.ModelShape(
        hidden=576, intermediate=1536, layers=30, q_size=576, kv_size=192, vocabulary=49152
    )
    assert shape.weight_bytes("bf16") == 2 * 134_479_872
    machine = {"bytes_per_s": {"bf16": 35e9}, "flops_per_s": {"bf16": 4e11}}

    def limit(kind: str, batch: int = 1, precision: str = "bf16") -> float:
        return limits.limit_tokens_per_s(
            case(kind=kind, precision=precision, batch=batch), shape, machine
        )

    # Memory binds one stream, arithmetic binds many; figures as in a hand calculation.
    assert limit("decode") == pytest.approx(35e9 / (269e6 + 3.7e6), rel=0.01)
    assert limit("decode", batch=32) == pytest.approx(4e11 / 0.28e9, rel=0.02)
    assert limit("prefill") == pytest.approx(4e11 / 0.23e9, rel=0.02)
    assert limit("lora") == pytest.approx(4e11 / 0.62e9, rel=0.02)
    assert limit("full") == pytest.approx(4e11 / 0.86e9, rel=0.02)
    assert limit("prefill", precision="q4_1") is None
