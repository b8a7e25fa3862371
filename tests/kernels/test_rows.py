"""rms_norm, rope, silu_mul and embedding: native against fp64, gradients, awkward sizes, row
invariance.
"""

from __future__ import annotations

import pytest
import torch

from lockstep import kernels
from lockstep.kernels.embedding import embedding
from lockstep.kernels.embedding import reference as embedding_reference
from lockstep.kernels.rms_norm import reference as rms_norm_reference
from lockstep.kernels.rms_norm import rms_norm
from lockstep.kernels.rope import reference as rope_reference
from lockstep.kernels.rope import rope
from lockstep.kernels.silu_mul import reference as silu_mul_reference
from lockstep.kernels.silu_mul import silu_mul

SIZES = [(1, 1), (3, 15), (5, 64), (2, 577)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rms_norm(isa, dtype, normal, assert_close, size):
    x, w, dy = (
        normal(*size, dtype=dtype).requires_grad_(),
        normal(size[1]).requires_grad_(),
        normal(*size, dtype=dtype),
    )
    y = rms_norm(x, w, 1e-5)
    y.backward(dy)
    exact_x, exact_w = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    exact = exact_x * torch.rsqrt(exact_x.square().mean(-1, keepdim=True) + 1e-5) * exact_w
    exact.backward(dy.double())
    assert_close(y, exact)
    assert_close(x.grad, exact_x.grad, scale=4)
    assert_close(w.grad, exact_w.grad, scale=8)
    with kernels.use_reference():
        assert_close(y, rms_norm_reference.rms_norm(x.detach(), w.detach(), 1e-5))


@pytest.mark.parametrize("head_dim", [2, 16, 34, 128])
def test_rope(isa, dtype, normal, assert_close, head_dim):
    x = normal(5, 3, head_dim, dtype=dtype).requires_grad_()
    positions = torch.tensor([0, 7, 3, 99, 1])
    cos, sin = normal(100, head_dim // 2).cos(), normal(100, head_dim // 2).sin()
    y, dy = rope(x, positions, cos, sin), normal(5, 3, head_dim, dtype=dtype)
    y.backward(dy)
    assert_close(y, rope_reference.rope(x.detach().float(), positions, cos, sin, False))
    assert_close(x.grad, rope_reference.rope(dy.float(), positions, cos, sin, True))


def test_rope_reads_strided_tokens(normal):
    """q, k and v may be slices of one projection's output."""
    qkv = normal(4, 10, 16)
    cos, sin = normal(9, 8), normal(9, 8)
    positions = torch.tensor([8, 0, 2, 1])
    assert torch.equal(
        rope(qkv[:, 2:5], positions, cos, sin), rope(qkv[:, 2:5].contiguous(), positions, cos, sin)
    )


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_silu_mul(isa, dtype, normal, assert_close, size):
    gate, up = (normal(*size, dtype=dtype).mul(4).requires_grad_() for _ in range(2))
    dy = normal(*size, dtype=dtype)
    y = silu_mul(gate, up)
    y.backward(dy)
    g, u = (x.detach().double().requires_grad_() for x in (gate, up))
    exact = g * torch.sigmoid(g) * u
    exact.backward(dy.double())
    for got, want in ((y, exact.detach()), (gate.grad, g.grad), (up.grad, u.grad)):
        assert_close(got, want)
    assert_close(y, silu_mul_reference.silu_mul(gate.detach(), up.detach()).double())


def test_silu_mul_extremes():
    gate = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30])
    y = silu_mul(gate, torch.ones(8))
    assert torch.equal(y[3:], torch.tensor([-0.0, 0.0, 88.0, 200.0, 1e30]))
    assert torch.all(y[:3].abs() < 1e-6)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_an_element_never_depends_on_its_place(dtype, normal, size):
    t, d = size
    x, w, up = normal(t, d, dtype=dtype), normal(d), normal(t, d, dtype=dtype)
    whole = rms_norm(x, w, 1e-5), silu_mul(x, up)
    for i in range(t):
        assert torch.equal(rms_norm(x[i : i + 1].clone(), w, 1e-5)[0], whole[0][i])
        for j in range(d):
            assert torch.equal(
                silu_mul(x[i, j].clone()[None], up[i, j].clone()[None])[0], whole[1][i, j]
            )


@pytest.mark.parametrize("d", [1, 70, 576])
def test_embedding(isa, dtype, normal, d):
    weight = normal(11, d).requires_grad_()
    tokens = torch.tensor([3, 0, 10, 3, 3])
    y = embedding(weight, tokens, dtype=dtype)
    assert torch.equal(y, weight.detach()[tokens].to(dtype))
    dy = normal(5, d, dtype=dtype)
    y.backward(dy)
    assert torch.equal(weight.grad, embedding_reference.embedding_backward(dy, tokens, 11))


def test_embedding_refuses_tokens_outside_the_table(normal):
    with pytest.raises(IndexError, match=r"token id 11 .* 0 to 10"):
        embedding(normal(11, 4), torch.tensor([0, 11]), dtype=torch.float32)
