"""AdamW: every instruction set against torch's in fp64, odd sizes, threads to the bit."""

from __future__ import annotations

import pytest
import torch

from lockstep import kernels
from lockstep.kernels.adamw import Update, adamw, reference, sums_of_squares


def make_update(step):
    return Update(
        rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=step, grad_scale=0.5
    )


def run(count, *, steps=3, dtype=torch.float32, update=adamw):
    generator = torch.Generator().manual_seed(count)
    weight = torch.randn(count, generator=generator).to(dtype)
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step in range(1, steps + 1):
        gradient = torch.randn(count, generator=generator).to(dtype)
        update(weight, mean, square, gradient, make_update(step))
    return weight, mean, square


@pytest.mark.parametrize("count", [1, 17, 4099, 70_001])
def test_matches_fp64(isa, count):
    exact = run(
        count,
        dtype=torch.float64,
        update=lambda *tensors: reference.adamw(*tensors[:4], *tensors[4].factors),
    )
    for got, want in zip(run(count), exact, strict=True):
        assert torch.allclose(got.double(), want, rtol=3e-6, atol=1e-8)


def test_the_specification_is_torchs_adamw():
    weight = torch.nn.Parameter(run(1000, steps=0, dtype=torch.float64)[0])
    theirs = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1000)
    torch.randn(1000, generator=generator)
    for _ in range(3):
        weight.grad = torch.randn(1000, generator=generator).double() * 0.5
        theirs.step()
    ours = run(
        1000,
        dtype=torch.float64,
        update=lambda *tensors: reference.adamw(*tensors[:4], *tensors[4].factors),
    )
    assert torch.allclose(ours[0], weight.detach(), rtol=1e-12)


def test_instruction_sets_and_threads_agree_to_the_bit():
    best, before = kernels.isa(), kernels.num_threads()
    results, sums = [], []
    try:
        for isa in ("portable", best):
            kernels.force_isa(isa)
            for threads in (1, 2):
                kernels.set_num_threads(threads)
                results.append(run(200_003))
                sums.append(sums_of_squares(results[-1][0]))
    finally:
        kernels.force_isa(best)
        kernels.set_num_threads(before)
    assert all(
        torch.equal(x, y) for other in results for x, y in zip(other, results[0], strict=True)
    )
    assert all(torch.equal(other, sums[0]) for other in sums)


@pytest.mark.parametrize("count", [0, 1, 1025, 70_001])
def test_sums_of_squares(isa, count, normal):
    x = normal(count)
    assert torch.allclose(sums_of_squares(x), reference.sums_of_squares(x), rtol=1e-6)
