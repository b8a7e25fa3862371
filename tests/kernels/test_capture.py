"""Captured functions: the same bits as eager ones, memory reused but never shared by mistake, and a
refusal for whatever a replay would not do.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from lockstep import kernels
from lockstep.kernels.arena import Arena, CaptureError
from lockstep.kernels.capture import Program, record
from lockstep.kernels.linear import PackCache, linear
from lockstep.kernels.rms_norm import rms_norm
from lockstep.kernels.sampling import sample
from lockstep.kernels.silu_mul import silu_mul

NAN_BYTE = 0xFF  # four of them are a NaN, in fp32 and bf16


class Steps:
    """A few layers of ops on a static input, as a model has them."""

    def __init__(self, normal, dtype: torch.dtype, rows: int = 5) -> None:
        self.x = normal(rows, 48).to(dtype)
        self.norm = torch.ones(48, dtype=dtype)
        self.up, self.down = normal(96, 48), normal(48, 96)
        self.packs = PackCache(), PackCache()

    def __call__(self) -> torch.Tensor:
        y = self.x
        for _ in range(4):
            z = linear(rms_norm(y, self.norm, 1e-5), self.up, packs=self.packs[0])
            y = linear(silu_mul(z, z), self.down, packs=self.packs[1])
        return y


@pytest.fixture
def arena() -> Arena:
    return Arena(1 << 20)


@torch.no_grad()
def test_a_replay_has_the_bits_of_an_eager_call(isa, normal, dtype, arena):
    steps = Steps(normal, dtype)
    steps()
    program, out = record(steps, arena)
    for seed in range(3):
        steps.x.copy_(torch.randn(5, 48, generator=torch.Generator().manual_seed(seed)))
        arena.fill_free(NAN_BYTE)
        program.replay()
        assert torch.equal(out, steps())


@torch.no_grad()
def test_floats_and_missing_pointers_pass_through_a_program(normal, arena):
    x, w = normal(3, 40), normal(40)
    program, (small, large) = record(lambda: (rms_norm(x, w, 1e-6), rms_norm(x, w, 1e6)), arena)
    program.replay()
    assert torch.equal(small, rms_norm(x, w, 1e-6))
    assert torch.equal(large, rms_norm(x, w, 1e6))


@torch.no_grad()
def test_memory_is_reused_within_a_program_and_shared_between_programs(normal, dtype, arena):
    small, large = Steps(normal, dtype, rows=5), Steps(normal, dtype, rows=50)
    small(), large()
    record(large, arena)
    peak = arena.peak_bytes
    assert peak < 5 * 50 * 96 * dtype.itemsize  # not all of its twelve intermediate results
    programs = [record(small, arena) for _ in range(20)]
    assert arena.peak_bytes == peak
    assert arena.num_live == 0
    for program, out in programs:
        arena.fill_free(NAN_BYTE)
        program.replay()
        assert torch.equal(out, small())


@torch.no_grad()
def test_what_a_program_needs_outlives_whoever_made_it(normal, arena):
    x = normal(4, 48)

    def build() -> tuple[Program, torch.Tensor, torch.Tensor]:
        weight, packs = normal(96, 48), PackCache()
        expected = linear(x, weight, packs=packs)
        return (*record(lambda: linear(x, weight, packs=packs), arena), expected)

    program, out, expected = build()
    gc.collect()
    filler = [torch.full((96 * 48,), float("nan")) for _ in range(50)]
    program.replay()
    assert torch.equal(out, expected)
    assert len(filler) == 50


@torch.no_grad()
@pytest.mark.parametrize(
    ("deed", "named"),
    [
        (lambda x: x + 1, "aten.add"),
        (lambda x: x + x[:1], "aten.add"),
        (lambda x: x * x, "aten.mul"),
        (lambda x: torch.cat((x, x)), "aten.cat"),
        (lambda x: x.t().contiguous(), "aten.clone"),
        (lambda x: x.to(torch.bfloat16), "aten._to_copy"),
        (lambda x: torch.zeros(3), "aten.zeros"),
        (lambda x: x[torch.tensor([0])], "aten."),
        (lambda x: float(x.sum()), "aten.sum"),
    ],
)
def test_other_deeds_are_refused_by_name(normal, arena, deed, named):
    x, w = normal(4, 48), normal(48)
    with pytest.raises(CaptureError, match=f"may only call Lockstep's kernels.*{named}"):
        record(lambda: deed(rms_norm(x, w, 1e-5)), arena)
    gc.collect()
    assert arena.num_live == 0
    assert torch.equal(rms_norm(x, w, 1e-5), rms_norm(x, w, 1e-5))


@torch.no_grad()
def test_packing_within_a_step_is_refused(normal, arena):
    x, weight = normal(4, 48), normal(96, 48)
    with pytest.raises(CaptureError, match="packed"):
        record(lambda: linear(x, weight, packs=PackCache()), arena)


@torch.no_grad()
def test_a_tensor_that_outlives_the_step_is_refused(normal, arena):
    x, w, kept = normal(4, 48), normal(48), []
    with pytest.raises(CaptureError, match="1 tensors made within a captured step outlive it"):
        record(lambda: kept.append(rms_norm(x, w, 1e-5)), arena)


@torch.no_grad()
def test_a_step_larger_than_the_arena_is_refused_with_the_sum(normal):
    x, w = normal(4, 48), normal(48)
    with pytest.raises(CaptureError, match=r"may use 512 bytes .* at least 768"):
        record(lambda: rms_norm(x, w, 1e-5), Arena(512))


@torch.no_grad()
def test_without_native_kernels_there_is_nothing_to_record(normal, arena):
    x, w = normal(4, 48), normal(48)
    with kernels.use_reference(), pytest.raises(CaptureError, match="no native kernels"):
        record(lambda: rms_norm(x, w, 1e-5), arena)


@torch.no_grad()
def test_other_threads_are_not_recorded(normal, arena):
    x, w = normal(4, 48), normal(48)
    other = torch.ones(4, 48)

    def step() -> torch.Tensor:
        thread = threading.Thread(target=lambda: silu_mul(other, other))
        y = rms_norm(x, w, 1e-5)
        thread.start()
        thread.join()
        return y

    program, _ = record(step, arena)
    assert program.num_calls == 1


@torch.no_grad()
def test_a_program_may_be_replayed_from_another_thread(normal, dtype, arena):
    steps = Steps(normal, dtype)
    steps()
    program, out = record(steps, arena)
    steps.x.mul_(2)
    thread = threading.Thread(target=program.replay)
    thread.start()
    thread.join()
    assert torch.equal(out, steps())


@torch.no_grad()
def test_sampling_is_captured(normal, arena):
    logits = normal(3, 100)
    columns = {
        "temperature_S": torch.tensor([0.0, 1.0, 0.7]),
        "top_k_S": torch.tensor([0, 0, 7]),
        "top_p_S": torch.tensor([1.0, 0.9, 1.0]),
        "min_p_S": torch.zeros(3),
        "seed_S": torch.tensor([1, 2, -3]),
        "position_S": torch.tensor([4, 5, 6]),
    }
    program, out = record(lambda: vars(sample(logits, **columns)), arena)
    columns["position_S"].add_(1)
    columns["temperature_S"][0] = 2.0
    program.replay()
    eager = sample(logits, **columns)
    assert torch.equal(out["token_ids_S"], eager.token_ids_S)
    assert torch.equal(out["sampling_logprobs_S"], eager.sampling_logprobs_S)


@torch.no_grad()
def test_sums_copies_and_tensors_side_by_side_are_kernels(isa, normal, dtype, arena):
    x, w = normal(7, 48).to(dtype), torch.ones(48, dtype=dtype)

    def step() -> tuple[torch.Tensor, ...]:
        y = rms_norm(x, w, 1e-5)
        middle = y.unflatten(1, (6, 8))[:, 2:5].contiguous()
        return x + y, torch.cat((y, x[:, :5].contiguous(), middle.flatten(1)), dim=1)

    program, outputs = record(step, arena)
    for bad in (1.0, float("nan"), float("inf"), 1e-40):
        x.copy_(normal(7, 48))
        x[3, 17] = bad
        arena.fill_free(NAN_BYTE)
        program.replay()
        for out, eager in zip(outputs, step(), strict=True):
            assert torch.equal(out.isnan(), eager.isnan())
            assert torch.equal(out.nan_to_num(), eager.nan_to_num())


@torch.no_grad()
def test_a_parameter_in_another_dtype_is_a_constant(normal, arena):
    x, w = normal(4, 48).bfloat16(), torch.nn.Parameter(normal(48))
    program, out = record(lambda: rms_norm(x, w, 1e-5), arena)
    gc.collect()
    x.mul_(3)
    program.replay()
    assert torch.equal(out, rms_norm(x, w, 1e-5))


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 17, 40])
def test_one_program_serves_all_sizes(normal, dtype, arena, count):
    steps = Steps(normal, dtype, rows=40)
    whole = steps.x

    def step(t: int) -> torch.Tensor:
        steps.x = whole[:t]
        return steps()

    step(3)
    program, out = record(step, arena, (1,), (40,))
    for t in (count, 40, count):
        arena.fill_free(NAN_BYTE)
        program.replay((t,))
        assert torch.equal(out[:t], step(t))


@torch.no_grad()
def test_sizes_of_several_inputs_vary_alone(normal, arena):
    x, z, w = normal(30, 48), normal(9, 48), torch.ones(48)

    def step(a: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm(x[:a], w, 1e-5), rms_norm(z[:b], w, 1e-5)

    program, outputs = record(step, arena, (1, 1), (30, 9))
    for sizes in ((30, 9), (1, 1), (7, 9), (30, 2)):
        program.replay(sizes)
        for out, eager, size in zip(outputs, step(*sizes), sizes, strict=True):
            assert torch.equal(out[:size], eager)
    with pytest.raises(AssertionError, match=r"sizes from \(1, 1\) to \(30, 9\), not \(31, 9\)"):
        program.replay((31, 9))


@torch.no_grad()
@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda x, w, t: rms_norm(x[: t * t], w, 1e-5), "not linear in its sizes"),
        (
            lambda x, w, t: rms_norm(x[:t], w, 1e-5) if t < 3 else silu_mul(x[:t], x[:t]),
            "depends on its sizes",
        ),
    ],
)
def test_what_sizes_change_beyond_numbers_is_refused(normal, arena, step, said):
    x, w = normal(40, 48), torch.ones(48)
    with pytest.raises(CaptureError, match=said):
        record(lambda t: step(x, w, t), arena, (1,), (6,))
