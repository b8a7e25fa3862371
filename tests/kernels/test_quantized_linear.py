"""Products with quantised weights: native against the reference to the bit where activations are
integers, gradients, row invariance, and fused against the separate ops.
"""

from __future__ import annotations

import pytest
import torch

from lockstep import kernels
from lockstep.core.quantization import SCHEMES, parse_scheme
from lockstep.kernels.embedding.quantized import quantized_embedding
from lockstep.kernels.linear import Norm, PackCache, gated_linear, linear, quantize_rtn
from lockstep.kernels.rms_norm import rms_norm
from lockstep.kernels.silu_mul import silu_mul

SHAPES = [(1, 64, 64), (3, 17, 5), (7, 200, 130), (5, 576, 65)]
K_QUANT_SHAPES = [(1, 256, 64), (7, 768, 130)]
FUSED = [None, "int8", "int4-g32-asym", "q4_1", "q4_k", "int4-a16", "fp8"]


def shapes_of(name: str) -> list[tuple[int, int, int]]:
    return K_QUANT_SHAPES if SCHEMES[name].super_group_size else SHAPES


@pytest.mark.parametrize("segments", [1, 8])
@pytest.mark.parametrize("name", SCHEMES)
def test_native_is_the_reference(isa, dtype, normal, assert_close, name, segments):
    for t, k, n in shapes_of(name):
        x, bias = normal(t, k, dtype=dtype), normal(n)
        weight = quantize_rtn(normal(n, k), parse_scheme(name))
        options = {"segments": segments, "fp32_out": True}
        with torch.no_grad():
            y = linear(x, weight, bias, packs=PackCache(), **options)
            with kernels.use_reference():
                want = linear(x, weight, bias, packs=PackCache(), **options)
        if weight.scheme.activation_bits == 8:
            assert torch.equal(y, want), (t, k, n)
        else:
            assert_close(y, want, scale=4)


@pytest.mark.parametrize("name", ["int8", "int4", "q4_0", "int4-g128"])
def test_rows_of_any_length(dtype, normal, name):
    """Prepared rows are laid out by their length, and those that share cache sets further apart."""
    for k in range(64, 2240, 64):
        x, weight = normal(7, k, dtype=dtype), quantize_rtn(normal(32, k), parse_scheme(name))
        packs = PackCache()
        with torch.no_grad():
            alone = torch.cat([linear(x[i : i + 1], weight, packs=packs) for i in range(7)])
            with kernels.use_reference():
                want = linear(x, weight, packs=PackCache())
            assert torch.equal(alone, want), k
            assert torch.equal(linear(x, weight, packs=packs), want), k


@pytest.mark.parametrize(
    "name", ["int8", "int4", "q4_0", "q4_k", "int4-g64-asym", "int4-a16", "q6_k", "fp8"]
)
def test_a_row_never_depends_on_the_others(dtype, normal, name):
    k, n = 768, 200
    x = normal(70, k, dtype=dtype)
    weight = quantize_rtn(normal(n, k), parse_scheme(name))
    packs = PackCache()
    before = kernels.num_threads()
    with torch.no_grad():
        alone = torch.cat(
            [linear(x[i : i + 1], weight, packs=packs, segments=8) for i in range(70)]
        )
        try:
            for threads in (1, 2):
                kernels.set_num_threads(threads)
                for m in (2, 3, 4, 5, 6, 7, 13, 31, 63, 64, 65, 70):
                    assert torch.equal(linear(x[:m], weight, packs=packs, segments=8), alone[:m])
        finally:
            kernels.set_num_threads(before)


@pytest.mark.parametrize("name", ["int8", "int4", "q4_0", "fp8"])
def test_infinities_and_nans_stay_in_their_row(dtype, normal, name):
    x, weight = normal(4, 130, dtype=dtype), quantize_rtn(normal(70, 130), parse_scheme(name))
    clean = linear(x, weight, packs=PackCache(), segments=8)
    x[1, 5], x[2, 129] = torch.nan, torch.inf
    y = linear(x, weight, packs=PackCache(), segments=8)
    assert y[1].isnan().all()
    assert not y[2].isfinite().any()
    assert torch.equal(y[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("name", ["int8", "int4-g64-asym", "q4_1", "int4-a16", "fp8"])
def test_gradients_go_straight_through(dtype, normal, assert_close, name):
    """The forward's bits are the frozen weight's; dX sees what it was rounded to, dW does not."""
    scheme = parse_scheme(name)
    x, master = normal(7, 200, dtype=dtype).requires_grad_(), normal(33, 200).requires_grad_()
    bias, dy = normal(33).requires_grad_(), normal(7, 33, dtype=dtype)
    y = linear(x, master, bias, packs=PackCache(), scheme=scheme)
    frozen = quantize_rtn(master, scheme)
    assert torch.equal(y, linear(x, frozen, bias, packs=PackCache()))
    y.backward(dy)
    weight = frozen.dequantize(dtype).double()
    assert_close(x.grad, dy.double() @ weight, scale=8)
    assert_close(master.grad, dy.double().t() @ x.detach().double(), scale=8)
    assert_close(bias.grad, dy.double().sum(0), scale=8)


def _weight(name, normal, n, k):
    float_weight = normal(n, k)
    return float_weight if name is None else quantize_rtn(float_weight, parse_scheme(name))


@pytest.mark.parametrize("name", FUSED)
def test_fused_is_composed(isa, dtype, normal, name):
    """Norm before, several weights side by side with biases, residual after."""
    k = 256
    weights = [_weight(name, normal, n, k) for n in (70, 32, 33)]
    biases = [normal(70), normal(32), normal(33)]
    x, residual = normal(5, k, dtype=dtype), normal(5, 135, dtype=dtype)
    norm = Norm(normal(k), 1e-5)
    for bias in ([], biases):
        with torch.no_grad():
            fused = linear(
                x, weights, bias, packs=PackCache(), norm=norm, residual_TN=residual, segments=8
            )
            h = rms_norm(x, norm.weight_K, norm.eps)
            apart = [
                linear(h, w, b, packs=PackCache(), segments=8)
                for w, b in zip(weights, bias or [None] * 3, strict=True)
            ]
        assert torch.equal(fused, residual + torch.cat(apart, 1))
        composed = linear(
            x.requires_grad_(),
            weights,
            bias,
            packs=PackCache(),
            norm=norm,
            residual_TN=residual,
            segments=8,
        )
        assert composed.requires_grad
        assert torch.equal(fused, composed)
        x = x.detach()


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("n", [64, 41])
def test_gated_is_composed(isa, dtype, normal, name, n):
    k = 256
    gate, up = _weight(name, normal, n, k), _weight(name, normal, n, k)
    x, norm, biases = normal(5, k, dtype=dtype), Norm(normal(k), 1e-5), [normal(n), normal(n)]
    packs = {
        "packs": PackCache(interleaved=True),
        "gate_packs": PackCache(),
        "up_packs": PackCache(),
    }
    for bias in ([], biases):
        with torch.no_grad():
            fused = gated_linear(x, gate, up, bias, norm=norm, **packs)
            h = rms_norm(x, norm.weight_K, norm.eps)
            gate_bias, up_bias = bias or (None, None)
            want = silu_mul(
                linear(h, gate, gate_bias, packs=PackCache()),
                linear(h, up, up_bias, packs=PackCache()),
            )
        assert torch.equal(fused, want)
        assert torch.equal(
            fused, gated_linear(x.requires_grad_(), gate, up, bias, norm=norm, **packs)
        )
        x = x.detach()


@pytest.mark.parametrize("name", ["int8", "int4-g64-asym", "int4-g32", "q4_1", "q6_k", "q4_k"])
def test_rows_of_a_packed_table(isa, dtype, normal, name):
    """The very values the product multiplies with; a token outside the table is named."""
    table = quantize_rtn(normal(130, 256), parse_scheme(name))
    tokens = torch.tensor([0, 129, 64, 63, 64, 7])
    with torch.no_grad():
        rows = quantized_embedding(table, tokens, dtype=dtype, packs=PackCache())
        with pytest.raises(IndexError, match="token id 130 is not in the vocabulary, 0 to 129"):
            quantized_embedding(table, torch.tensor([130]), dtype=dtype, packs=PackCache())
    assert torch.equal(rows, table.dequantize(dtype)[tokens])


def test_packs_follow_any_member_and_stay_where_they_are(normal):
    x, weights, packs = normal(2, 64), [normal(64, 64), normal(8, 64)], PackCache()
    with torch.no_grad():
        before = linear(x, weights, packs=packs)
        place = packs.get(weights, torch.float32).data.data_ptr()
        weights[1].mul_(2.0)
        after = linear(x, weights, packs=packs)
    assert torch.equal(after[:, :64], before[:, :64])
    assert torch.equal(after[:, 64:], before[:, 64:] * 2)
    assert packs.get(weights, torch.float32).data.data_ptr() == place


def test_op_is_well_formed(normal):
    x, master = normal(3, 64).requires_grad_(), normal(4, 64).requires_grad_()
    packed = PackCache().get([master], torch.float32, scheme=SCHEMES["q4_1"])
    parts = list(packed.quantized.tensors().values())
    arguments = (x, [master], [], parts, packed.data, None, "q4_1", 1, False)
    torch.library.opcheck(torch.ops.lockstep.quantized_linear.default, arguments)
