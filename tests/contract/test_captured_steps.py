"""Captured steps change no bit: a program replayed gives what its kernels give one by one, whatever
came in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from lockstep import kernels
from lockstep.core.quantization import parse_scheme
from lockstep.core.sampling import SamplingParams
from lockstep.engine import AsyncEngine, EngineConfig, Request
from lockstep.kernels.capture import Program
from lockstep.kernels.linear import quantize_rtn
from lockstep.models.layers import set_weight

NAN_BYTE = 0xFF


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Memory of no tensor is NaN before each replay; counts the replays."""
    replays: list[int] = []

    def watch(engine) -> None:
        replay = Program.replay

        def poison_first(program: Program, sizes: tuple[int, ...] = ()) -> None:
            engine._runner.programs.arena.fill_free(NAN_BYTE)
            replays.append(program.num_calls)
            replay(program, sizes)

        monkeypatch.setattr(Program, "replay", poison_first)

    watch.replays = replays  # type: ignore[attr-defined]
    return watch  # type: ignore[return-value]


@pytest.mark.parametrize("chunk", [None, 16])
def test_captured_and_eager_answers_agree(
    family, precision, threads, chunk, shared_model, engine_of, requests_of, bits_of, poisoned
):
    model, requests = shared_model(family, precision), requests_of(14, seed=5)
    sizes = {"max_chunk_tokens": chunk, "max_num_seqs": 5}
    eager = [bits_of(c) for c in engine_of(model, capture="off", **sizes).run(requests)]
    engine = engine_of(model, **sizes)
    poisoned(engine)
    for _ in range(3):
        engine.weights_updated(0)  # empties the prefix cache, so that shapes come again
        assert [bits_of(c) for c in engine.run(requests)] == eager
    assert engine._runner.programs.refusals == frozenset()
    assert len(poisoned.replays) > 20


def test_more_rows_than_logits_are_held_at_once(shared_model, engine_of, bits_of, poisoned):
    model = shared_model("qwen2", "fp32")
    requests = [
        Request(
            request_id=str(i),
            prompt_token_ids=[i % 50, 7],
            params=SamplingParams(
                max_tokens=6, seed=i, temperature=i % 3 / 2, logprobs=2 if i == 70 else None
            ),
        )
        for i in range(90)
    ]
    eager = [bits_of(c) for c in engine_of(model, capture="off").run(requests)]
    engine = engine_of(model)
    poisoned(engine)
    for _ in range(3):
        assert [bits_of(c) for c in engine.run(requests)] == eager
    assert poisoned.replays


@pytest.mark.parametrize("how", ["in place", "replaced data", "replaced parameter", "quantised"])
def test_new_weights_are_seen_without_being_told(how, fresh_model, engine_of, requests_of, bits_of):
    model, requests = fresh_model("llama", "bf16"), requests_of(4, seed=2)
    engine = engine_of(model, enable_prefix_cache=False)
    for _ in range(3):
        before = [bits_of(c) for c in engine.run(requests)]
    assert len(engine._runner.programs) > 0
    layer = model.model.layers[1].mlp.up_proj
    with torch.no_grad():
        if how == "in place":
            layer.weight.mul_(1.5)
        elif how == "replaced data":
            layer.weight.data = layer.weight.data * 1.5
        elif how == "quantised":
            set_weight(layer, quantize_rtn(layer.weight, parse_scheme("int8")))
        else:
            layer.weight = torch.nn.Parameter(layer.weight * 1.5)
    after = [bits_of(c) for c in engine.run(requests)]
    assert after == [bits_of(c) for c in engine_of(model, capture="off").run(requests)]
    assert after != before


def test_instruction_sets_threads_and_references_may_change_under_an_engine(
    shared_model, engine_of, requests_of, bits_of
):
    model, requests = shared_model("llama", "fp32"), requests_of(4, seed=3)
    engine = engine_of(model, enable_prefix_cache=False)
    expected = [bits_of(c) for c in engine.run(requests)]
    best, num_threads = kernels.isa(), kernels.num_threads()

    def check() -> None:
        for _ in range(3):
            assert [bits_of(c) for c in engine.run(requests)] == expected

    try:
        check()
        kernels.force_isa("portable")
        check()
        kernels.force_isa(best)
        kernels.set_num_threads(3)
        check()
        with kernels.use_reference():
            engine.run(requests)  # packs every weight anew, in the reference's form
        check()
    finally:
        kernels.force_isa(best)
        kernels.set_num_threads(num_threads)


def test_a_longer_rope_table_ends_programs_that_know_the_old_one(
    fresh_model, engine_of, requests_of, bits_of
):
    model = fresh_model("llama", "fp32")
    engine = engine_of(model, enable_prefix_cache=False)
    short = requests_of(4, seed=4, longest=20)
    (long,) = requests_of(1, seed=9, longest=300)
    eager = engine_of(model, capture="off")
    for requests in (short, short, short, [long], short, short, short, [long]):
        assert [bits_of(c) for c in engine.run(requests)] == [
            bits_of(c) for c in eager.run(requests)
        ]


def test_the_least_recently_used_programs_are_dropped(
    shared_model, engine_of, requests_of, bits_of
):
    model, requests = shared_model("mistral", "bf16"), requests_of(10, seed=6)
    expected = [bits_of(c) for c in engine_of(model, capture="off").run(requests)]
    engine = engine_of(model, enable_prefix_cache=False)
    programs = engine._runner.programs
    programs._max_programs = 3
    for _ in range(4):
        assert [bits_of(c) for c in engine.run(requests)] == expected
        assert len(programs) <= 3
    assert programs.num_bytes < 16 << 20


def test_an_engine_in_a_thread_of_its_own_replays(shared_model, engine_of, requests_of, bits_of):
    model, (request, *_) = shared_model("qwen3", "bf16"), requests_of(1, seed=8, max_tokens=12)
    (expected,) = (bits_of(c) for c in engine_of(model, capture="off").run([request]))
    engine = AsyncEngine(model, None, EngineConfig(kv_cache_tokens=4096))

    async def tokens() -> list[int]:
        return [t async for delta in engine.generate(request) for t in delta.token_ids]

    try:
        answers = [asyncio.run(tokens()) for _ in range(4)]
    finally:
        engine.close()
    drawn = [entry[0] for entry in expected][-len(answers[0]) :]
    assert answers == [drawn] * 4
