"""Weight formats: GGUF blocks against the gguf library, rounding, and the reference product in
fp64.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES

from lockstep.core.errors import ConfigError
from lockstep.core.quantization import SCHEMES, parse_scheme
from lockstep.kernels.linear.formats import can_concatenate, concatenate, quantize_rtn
from lockstep.kernels.linear.gguf_blocks import BLOCK_BYTES, from_blocks
from lockstep.kernels.linear.quantized_reference import fma, linear, quantize_rows

ROUNDING_BOUND = {8: 1 / 250, 6: 1 / 55, 5: 1 / 28, 4: 1 / 13}
"""Of the largest error to the largest value of a group, by bits."""


def inputs_of(scheme) -> int:
    return 512 if scheme.super_group_size else 200


@pytest.mark.parametrize("name", sorted(BLOCK_BYTES))
def test_gguf_blocks_dequantise_as_the_library_does(name):
    """Random bytes are valid blocks; scales are made finite, as files have them."""
    kind = GGMLQuantizationType[name.upper()]
    block, size = GGML_QUANT_SIZES[kind]
    assert size == BLOCK_BYTES[name]
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (5, 3 * size), dtype=np.uint8)
    halves = {"q6_k": (208,), "q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2)}.get(name, (0,))
    blocks = raw.reshape(5, 3, size)
    for at in halves:
        scales = rng.normal(size=(5, 3, 1)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    weight = from_blocks(torch.from_numpy(raw), name)
    assert weight.shape == (5, 3 * block)
    assert torch.equal(weight.dequantize(), torch.from_numpy(quants.dequantize(raw, kind)))


@pytest.mark.parametrize("name", SCHEMES)
def test_rounding_to_nearest(name, normal):
    """Every value within half a step of its own; groups of zeros and of one sign included."""
    scheme = SCHEMES[name]
    k = inputs_of(scheme)
    w = normal(7, k)
    w[1] = 0.0
    w[2] = w[2].abs()
    w[3] *= 1e-3
    quantised = quantize_rtn(w, scheme)
    error = (quantised.dequantize() - w).abs()
    assert torch.equal(quantised.dequantize()[1], w[1])
    if scheme.kind == "float":
        assert (error <= w.abs() / 16 + 1e-6).all()
        return
    size = scheme.group_size or k
    error = torch.nn.functional.pad(error, (0, -k % size)).view(7, -1, size)
    groups = torch.nn.functional.pad(w, (0, -k % size)).view(7, -1, size)
    slack = 2.5 if scheme.super_group_size else 1.0
    span = groups.amax(2) - groups.amin(2)
    bound = span.maximum(groups.abs().amax(2)) * ROUNDING_BOUND[scheme.bits] * slack
    assert (error.amax(2) <= bound + 1e-7).all()


@pytest.mark.parametrize("name", ["int8", "int4-g32", "int4-g32-asym", "q4_1", "fp8", "q6_k"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_becomes_nan(name, value, normal):
    scheme = SCHEMES[name]
    w = normal(3, inputs_of(scheme))
    w[1, 40] = value
    weight = quantize_rtn(w, scheme).dequantize()
    assert weight[1, 40].isnan()
    assert weight[[0, 2]].isfinite().all()


def test_k_quants_need_whole_super_groups(normal):
    with pytest.raises(ConfigError, match="multiple of 256 inputs, the weight has 72; use q8_0"):
        quantize_rtn(normal(4, 72), SCHEMES["q4_k"])


@pytest.mark.parametrize("name", ["int8", "int4-g64-asym", "q4_k"])
def test_rows_and_concatenation(name, normal):
    scheme = SCHEMES[name]
    w = normal(6, inputs_of(scheme))
    whole = quantize_rtn(w, scheme)
    order = torch.tensor([5, 0, 0, 3])
    assert torch.equal(whole.rows(order).dequantize(), whole.dequantize()[order])
    parts = [quantize_rtn(w[:2], scheme), quantize_rtn(w[2:], scheme)]
    assert can_concatenate(parts)
    assert torch.equal(concatenate(parts).dequantize(), whole.dequantize())
    assert not can_concatenate([whole, quantize_rtn(w, SCHEMES["q8_0"])])


def test_fma_rounds_once(normal):
    """Against exact fractions, at magnitudes where two roundings differ from one."""
    a, b = normal(400), normal(400)
    c = -(a * b) * (1 + normal(400) * 2.0**-22) + normal(400) * 2.0 ** torch.randint(-60, 3, (400,))
    for x, y, z, got in zip(*(t.tolist() for t in (a, b, c, fma(a, b, c))), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        neighbours = [
            got,
            *(float(np.nextafter(np.float32(got), np.float32(s * 9e9))) for s in (-1, 1)),
        ]
        assert min(neighbours, key=lambda f: abs(Fraction(f) - exact)) == got


def test_rows_are_quantised_by_blocks_of_64(dtype, normal):
    x = normal(5, 150, dtype=dtype)
    x[1, 64:128] = 0.0
    x[2, 70] = torch.inf
    x[3, 140] = torch.nan
    x[4, :64] *= 1e-39
    q, scales = quantize_rows(x)
    assert q.shape == (5, 150)
    assert scales.shape == (5, 3)
    assert scales[1, 1] == 0
    assert scales[2].isnan().tolist() == [False, True, False]
    assert scales[3].isnan().tolist() == [False, False, True]
    assert not q[1, 64:128].any()
    assert not q[4, :64].any()
    assert q[0, :64].abs().max() == 127
    restored = q[0] * scales[0].repeat_interleave(64)[:150]
    assert ((restored - x[0].float()).abs() <= scales[0].max() * 0.51).all()


@pytest.mark.parametrize("segments", [1, 8])
@pytest.mark.parametrize("name", SCHEMES)
def test_reference_product_against_fp64(name, segments, normal, dtype):
    """The product of what was rounded: activations by quantize_rows, weights by dequantize."""
    scheme = SCHEMES[name]
    k = 768 if scheme.super_group_size else 700
    x, bias = normal(4, k, dtype=dtype), normal(9)
    weight = quantize_rtn(normal(9, k), scheme)
    seen = x.double()
    if scheme.activation_bits == 8:
        q, scales = quantize_rows(x)
        seen = q.double() * scales.double().repeat_interleave(64, 1)[:, :k]
    exact = seen @ _exact(weight).t() + bias.double()
    y = linear(x, weight, bias, segments)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=3e-6 * float(exact.abs().max()))


def _exact(weight):
    """The weight in fp64, nothing rounded."""
    minimums = weight.group_minimums()
    exact = weight.integers().double() * weight._per_input(weight.group_scales().double())
    return exact if minimums is None else exact + weight._per_input(minimums.double())


def test_a_row_that_is_not_finite_becomes_nan_alone(normal):
    x = normal(3, 130)
    x[1, 100] = torch.inf
    y = linear(x, quantize_rtn(normal(5, 130), parse_scheme("int8")), None, 8)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()
