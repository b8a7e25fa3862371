"""split_qkv: the bits of norm and rotation one after the other, and their gradient."""

from __future__ import annotations

import pytest
import torch

from lockstep import kernels
from lockstep.kernels.attention import attention_packed, attention_scored
from lockstep.kernels.rms_norm import rms_norm
from lockstep.kernels.rope import rope
from lockstep.kernels.split_qkv import split_qkv

N, K, EPS = 6, 2, 1e-5


def arguments(normal, dtype, h, *, normed, tokens=37):
    qkv = normal(tokens, (N + 2 * K) * h, dtype=dtype)
    positions = torch.arange(tokens).flip(0)
    angles = normal(tokens, h // 2)
    norms = (normal(h), normal(h)) if normed else (None, None)
    return qkv, positions, angles.cos(), angles.sin(), *norms


def options(q_norm, k_norm):
    names = {"q_norm_H": q_norm, "k_norm_H": k_norm, "eps": EPS}
    return {**names, "num_heads": N, "num_kv_heads": K}


def step_by_step(qkv, positions, cos, sin, q_norm, k_norm):
    heads = qkv.unflatten(1, (N + 2 * K, -1))
    q, k, v = heads.split((N, K, K), dim=1)
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, EPS), rms_norm(k, k_norm, EPS)
    return rope(q, positions, cos, sin), rope(k, positions, cos, sin), v


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("h", [8, 24, 64])
def test_bits_and_gradients_are_those_of_the_steps(isa, dtype, normal, h, normed):
    qkv, positions, cos, sin, *norms = arguments(normal, dtype, h, normed=normed)
    grads = (normal(37, N, h), normal(37, K, h), normal(37, K, h))
    results = []
    for function in (step_by_step, lambda *a: split_qkv(*a[:4], **options(*a[4:]))):
        leaves = [x.clone().requires_grad_() for x in (qkv, *norms) if x is not None]
        q_norm, k_norm = leaves[1:] or (None, None)
        heads = function(leaves[0], positions, cos, sin, q_norm, k_norm)
        torch.autograd.backward(heads, [g.to(dtype) for g in grads])
        results.append([*(x.detach() for x in heads), *(x.grad for x in leaves)])
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("normed", [False, True])
def test_fused_attention_has_the_bits_of_the_steps(isa, dtype, normal, normed):
    """From the heads as projected in one call, rows further apart than they are wide."""
    qkv, positions, cos, sin, *norms = arguments(normal, dtype, 64, normed=normed)
    wide = torch.cat((qkv, qkv[:, :48]), dim=1)[:, : qkv.shape[1]]
    cu = torch.tensor([0, 20, 37], dtype=torch.int32)
    with torch.no_grad():
        got = attention_scored(
            wide, positions, cos, sin, **options(*norms), cu_seqlens_S1=cu, scale=0.125
        )
        heads = step_by_step(qkv, positions, cos, sin, *norms)
        want = attention_packed(*heads, cu, scale=0.125)
    assert torch.equal(got, want.flatten(1))


@pytest.mark.parametrize("normed", [False, True])
def test_reference_matches(dtype, normal, assert_close, normed):
    qkv, positions, cos, sin, *norms = arguments(normal, dtype, 24, normed=normed)
    native = split_qkv(qkv, positions, cos, sin, **options(*norms))
    with kernels.use_reference():
        for got, want in zip(
            native, split_qkv(qkv, positions, cos, sin, **options(*norms)), strict=True
        ):
            assert_close(got, want)


def test_op_is_well_formed(normal):
    qkv, *rest = arguments(normal, torch.float32, 8, normed=True, tokens=5)
    everything = (qkv.requires_grad_(), *rest, EPS, N, K)
    torch.library.opcheck(torch.ops.lockstep.split_qkv.default, everything)
