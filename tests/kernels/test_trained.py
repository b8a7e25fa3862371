"""Products of a training step: bits of the separate ops forward, gradients against float64."""

from __future__ import annotations

from itertools import product as combinations

import pytest
import torch
from torch import Tensor

from lockstep.kernels.gradients import accumulated_in_place
from lockstep.kernels.linear import PackCache, linear
from lockstep.kernels.linear.trained import Adapter, Projection, gated_mlp, product, products
from lockstep.kernels.rms_norm import rms_norm
from lockstep.kernels.scale import scale
from lockstep.kernels.silu_mul import silu_mul

EPS, RANK, SCALING = 1e-5, 6, 0.3
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
CASES = [
    pytest.param(dtype, biased, adapted, id=f"{dtype}-{biased=}-{adapted=}")
    for dtype, biased, adapted in combinations(TOLERANCE, (False, True), (False, True))
]


class Weights:
    """Makes projections, and remembers their tensors."""

    def __init__(self, *, biased: bool, adapted: bool) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._biased, self._adapted = biased, adapted
        self.trained: list[Tensor] = []

    def normal(self, *shape: int, std: float = 1.0, trained: bool = True) -> Tensor:
        values = torch.randn(*shape, generator=self._generator) * std
        if trained:
            self.trained.append(values.requires_grad_())
        return values

    def projection(self, n: int, k: int, segments: int = 1) -> Projection:
        adapter = None
        weight = self.normal(n, k, std=k**-0.5, trained=not self._adapted)
        if self._adapted:
            a, b = self.normal(RANK, k, std=k**-0.5), self.normal(n, RANK, std=RANK**-0.5)
            adapter = Adapter(a_RK=a, b_NR=b, scaling=SCALING, segments=segments)
        return Projection(
            weight_NK=weight,
            bias_N=self.normal(n) if self._biased else None,
            packs=PackCache(),
            segments=segments,
            adapter=adapter,
        )


def separate(x: Tensor, p: Projection) -> Tensor:
    """One projection out of the ops that have a backward each."""
    y = linear(x, p.weight_NK, p.bias_N, packs=PackCache(), segments=p.segments)
    if p.adapter is None:
        return y
    a, b = p.adapter.a_RK, p.adapter.b_NR
    hidden = linear(x, a, packs=PackCache(), segments=p.adapter.segments)
    return y + linear(scale(hidden, p.adapter.scaling), b, packs=PackCache())


def exact(x: Tensor, p: Projection, doubles: dict[Tensor, Tensor]) -> Tensor:
    def of(t: Tensor) -> Tensor:
        return doubles.get(t, t.detach().double())

    y = x @ of(p.weight_NK).t()
    if p.bias_N is not None:
        y = y + of(p.bias_N)
    if p.adapter is not None:
        y = y + p.adapter.scaling * (x @ of(p.adapter.a_RK).t()) @ of(p.adapter.b_NR).t()
    return y


def normed(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w


def check(ours: Tensor, wanted: Tensor, inputs: list[Tensor], exact_inputs: list[Tensor]) -> None:
    dy = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).to(ours.dtype)
    gradients = torch.autograd.grad(ours, inputs, dy)
    exact_gradients = torch.autograd.grad(wanted, exact_inputs, dy.double())
    for got, expected in zip(gradients, exact_gradients, strict=True):
        error = (got.double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[ours.dtype], (tuple(got.shape), error)


@pytest.mark.parametrize(("dtype", "biased", "adapted"), CASES)
def test_an_attention_block(isa: str, dtype: torch.dtype, biased: bool, adapted: bool) -> None:
    t, d = 37, 48
    weights = Weights(biased=biased, adapted=adapted)
    x, norm = weights.normal(t, d, trained=False).to(dtype).requires_grad_(), weights.normal(d)
    qkv = [weights.projection(n, d) for n in (48, 16, 16)]
    out = weights.projection(d, 80, segments=8)
    y, alias = products(x, qkv, PackCache(), norm, EPS)
    o = product(y, out, alias)

    h = rms_norm(x, norm, EPS)
    y_separate = torch.cat([separate(h, p) for p in qkv], 1)
    assert torch.equal(y, y_separate)
    assert torch.equal(o, x + separate(y_separate, out))

    doubles = {w: w.detach().double().requires_grad_() for w in weights.trained}
    x64 = x.detach().double().requires_grad_()
    y64 = torch.cat([exact(normed(x64, doubles[norm]), p, doubles) for p in qkv], 1)
    o64 = x64 + exact(y64, out, doubles)
    check(o, o64, [x, *weights.trained], [x64, *doubles.values()])


@pytest.mark.parametrize(("dtype", "biased", "adapted"), CASES)
def test_a_gated_mlp(isa: str, dtype: torch.dtype, biased: bool, adapted: bool) -> None:
    t, d, f = 29, 40, 72
    weights = Weights(biased=biased, adapted=adapted)
    x, norm = weights.normal(t, d, trained=False).to(dtype).requires_grad_(), weights.normal(d)
    gate, up = weights.projection(f, d), weights.projection(f, d)
    down = weights.projection(d, f, segments=8)
    y = gated_mlp(x, gate, up, down, norm, EPS)

    h = rms_norm(x, norm, EPS)
    gated = silu_mul(separate(h, gate), separate(h, up))
    assert torch.equal(y, x + separate(gated, down))

    inputs, dy = [x, *weights.trained], torch.ones_like(y)
    again = gated_mlp(x, gate, up, down, norm, EPS, recompute=True)
    kept, made_again = (
        torch.autograd.grad(out, inputs, dy, retain_graph=True) for out in (y, again)
    )
    assert torch.equal(again, y)
    assert all(map(torch.equal, kept, made_again))

    doubles = {w: w.detach().double().requires_grad_() for w in weights.trained}
    x64 = x.detach().double().requires_grad_()
    h64 = normed(x64, doubles[norm])
    gated64 = torch.nn.functional.silu(exact(h64, gate, doubles)) * exact(h64, up, doubles)
    check(y, x64 + exact(gated64, down, doubles), inputs, [x64, *doubles.values()])


def test_gradients_added_in_place_are_the_sum_of_both() -> None:
    weights = Weights(biased=False, adapted=False)
    x, norm = weights.normal(33, 48, trained=False), weights.normal(48)
    projection = weights.projection(32, 48)

    def backward(rows: slice) -> None:
        y, _ = products(x[rows], [projection], projection.packs, norm, EPS)
        y.backward(torch.ones_like(y))

    backward(slice(None))
    whole = [weight.grad for weight in weights.trained]
    for weight in weights.trained:
        weight.grad = None
    with accumulated_in_place():
        backward(slice(0, 20))
        first = projection.weight_NK.grad
        backward(slice(20, None))
    assert projection.weight_NK.grad is first
    for weight, expected in zip(weights.trained, whole, strict=True):
        assert weight.grad is not None
        assert expected is not None
        torch.testing.assert_close(weight.grad, expected)
