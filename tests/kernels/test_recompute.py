"""Activations that are recomputed in the backward pass: the same gradients, and nothing kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from lockstep.kernels.linear import PackCache, linear
from lockstep.kernels.rms_norm import rms_norm
from lockstep.kernels.silu_mul import silu_mul


@pytest.mark.parametrize("op", ["rms_norm", "silu_mul"])
def test_gradients_are_those_of_a_kept_activation(dtype, normal, op):
    x, other, w = (
        normal(*shape, dtype=kind).requires_grad_()
        for shape, kind in [((9, 32), dtype), ((9, 32), dtype), ((20, 32), torch.float32)]
    )

    def activation():
        return rms_norm(x, other[0], 1e-5) if op == "rms_norm" else silu_mul(x, other)

    y = activation()
    held = weakref.ref(y)
    output = linear(y, w, packs=PackCache())
    del y
    gc.collect()
    assert held() is None, "the activation is still kept"
    recomputed = torch.autograd.grad(output.float().square().sum(), (x, other, w))
    output = linear(activation() * 1, w, packs=PackCache())  # the factor hides what it is made of
    kept = torch.autograd.grad(output.float().square().sum(), (x, other, w))
    assert all(torch.equal(a, b) for a, b in zip(recomputed, kept, strict=True))


def test_the_packed_copy_of_a_trained_weight_is_not_kept(normal):
    x, w, packs = normal(3, 8), normal(5, 8).requires_grad_(), PackCache()
    assert packs.get([w], x.dtype) is not packs.get([w], x.dtype)
    with torch.no_grad():
        kept = packs.get([w], x.dtype)
    assert packs.get([w], x.dtype) is kept, "a copy that is at hand is used"
    assert torch.equal(linear(x, w, packs=packs), linear(x, w, packs=PackCache()))
