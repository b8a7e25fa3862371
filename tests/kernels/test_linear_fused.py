"""Fused products have the bits of the ops they replace: norm before, residual or gate after, q, k
and v as one.
"""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.linear import cpu, packing
from lockstep.kernels.rms_norm.cpu import rms_norm
from lockstep.kernels.silu_mul.cpu import silu_mul

ROWS = (1, 2, 5, 8, 33, 70, 200)


@pytest.mark.parametrize("k", [64, 97, 576])
def test_norm_before_the_product(isa, dtype, normal, k):
    w, norm_weight, bias = normal(80, k), normal(k, dtype=dtype), normal(80)
    packed = packing.pack([w], dtype)
    for t in ROWS:
        x = normal(t, k, dtype=dtype)
        fused = cpu.gemm(x, packed, 80, bias_N=bias, norm_weight_K=norm_weight, eps=1e-5)
        normed = rms_norm(x, norm_weight, 1e-5)
        assert torch.equal(fused, cpu.gemm(normed, packed, 80, bias_N=bias)), t


@pytest.mark.parametrize("segments", [1, 8])
def test_residual_after_the_product(isa, dtype, normal, segments):
    w = normal(130, 192)
    packed = packing.pack([w], dtype)
    for t in ROWS:
        x, residual = normal(t, 192, dtype=dtype), normal(t, 130, dtype=dtype)
        composed = cpu.gemm(x, packed, 130, segments=segments) + residual
        fused = cpu.gemm(x, packed, 130, segments=segments, residual_TN=residual)
        assert torch.equal(fused, composed)
        in_place = cpu.gemm(x, packed, 130, segments=segments, residual_TN=residual, out=residual)
        assert in_place is residual
        assert torch.equal(in_place, composed)


@pytest.mark.parametrize("width", [5, 16, 40, 96])
def test_gate_and_up_as_one_product(isa, dtype, normal, width):
    k = 72
    gate, up, gate_bias, up_bias = normal(width, k), normal(width, k), normal(width), normal(width)
    packed = packing.pack([gate, up], dtype, interleaved=True)
    bias = packing.pack_bias([gate_bias, up_bias], dtype, interleaved=True)
    for t in ROWS:
        x, norm_weight = normal(t, k, dtype=dtype), normal(k, dtype=dtype)
        fused = cpu.gemm(
            x,
            packed,
            width,
            column_bias=bias,
            norm_weight_K=norm_weight,
            eps=1e-6,
            silu_mul=True,
        )
        normed = rms_norm(x, norm_weight, 1e-6)
        composed = silu_mul(
            cpu.gemm(normed, packing.pack([gate], dtype), width, bias_N=gate_bias),
            cpu.gemm(normed, packing.pack([up], dtype), width, bias_N=up_bias),
        )
        assert torch.equal(fused, composed), t


def test_several_weights_as_one_product(isa, dtype, normal):
    """Pieces that begin and end inside a panel keep the bits of each alone; x with a row stride."""
    sizes, k = (70, 20, 45), 66
    pieces = [normal(size, k) for size in sizes]
    packed = packing.pack(pieces, dtype)
    for t in ROWS:
        x = normal(t, 2 * k, dtype=dtype)[:, :k]
        parts = [
            cpu.gemm(x, packing.pack([w], dtype), n) for w, n in zip(pieces, sizes, strict=True)
        ]
        assert torch.equal(cpu.gemm(x, packed, sum(sizes)), torch.cat(parts, 1))


def test_accumulates(isa, dtype, normal):
    x, w, before = normal(9, 40, dtype=dtype), normal(30, 40), normal(9, 30)
    packed = packing.pack([w], dtype)
    product = cpu.gemm(x, packed, 30, out_dtype=torch.float32)
    total = cpu.gemm(x, packed, 30, out=before.clone(), accumulate=True)
    assert torch.equal(total, before + product)
