"""Matrix product: every instruction set against fp64, odd shapes, gradients, and row invariance to
the bit.
"""

from __future__ import annotations

import pytest
import torch

from lockstep import kernels
from lockstep.kernels.linear import PackCache, cpu, linear
from lockstep.kernels.linear.reference import segment_length

SHAPES = [
    (1, 1, 1),
    (1, 64, 64),
    (3, 17, 5),
    (6, 33, 65),
    (7, 576, 192),
    (13, 96, 130),
    (64, 72, 48),
]


def exact(x, w, bias):
    y = x.double() @ w.to(x.dtype).double().t()
    return y if bias is None else y + bias.to(x.dtype).double()


@pytest.mark.parametrize("segments", [1, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(isa, dtype, normal, assert_close, shape, segments):
    t, k, n = shape
    x, w, bias = normal(t, k, dtype=dtype), normal(n, k), normal(n)
    y = linear(x, w, bias, packs=PackCache(), segments=segments, fp32_out=True)
    assert_close(y, exact(x, w, bias), scale=8)
    rounded = linear(x, w, bias, packs=PackCache(), segments=segments)
    assert torch.equal(rounded, y.to(dtype))


@pytest.mark.parametrize("k", [2500, 4100])
def test_long_sums_are_blocked_without_changing_a_bit(dtype, normal, k):
    """K beyond the cache block: the bits of a plain ascending fma at any number of rows."""
    x, w = normal(9, k, dtype=dtype), normal(80, k)
    packs = PackCache()
    whole = linear(x, w, packs=packs, fp32_out=True)
    for row in range(9):
        assert torch.equal(linear(x[row : row + 1], w, packs=packs, fp32_out=True)[0], whole[row])


@pytest.mark.parametrize("segments", [1, 8])
def test_a_row_never_depends_on_the_others(dtype, normal, segments):
    """Every row of every M, alone or in company, 1 and 2 threads; K and N off the tile sizes."""
    k, n = 1538, 200
    x, w = normal(131, k, dtype=dtype), normal(n, k)
    packs = PackCache()
    before = kernels.num_threads()
    alone = torch.cat([linear(x[i : i + 1], w, packs=packs, segments=segments) for i in range(131)])
    try:
        for threads in (1, 2):
            kernels.set_num_threads(threads)
            for m in (2, 3, 5, 6, 7, 8, 12, 13, 31, 64, 96, 97, 131):
                assert torch.equal(linear(x[:m], w, packs=packs, segments=segments), alone[:m]), m
    finally:
        kernels.set_num_threads(before)


def test_segments_are_joined_by_the_fixed_tree(normal):
    """Eight partial products computed apart and added by the documented tree give the same bits."""
    k = 1536
    x, w = normal(5, k), normal(70, k)
    y = linear(x, w, packs=PackCache(), segments=8)
    length = segment_length(k, 8)
    part = [
        linear(
            x[:, i : i + length].contiguous(), w[:, i : i + length].contiguous(), packs=PackCache()
        )
        for i in range(0, k, length)
    ]
    tree = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]))
    assert torch.equal(y, tree)


def test_instruction_sets_agree_to_the_bit(on_each_isa, normal, dtype):
    """Beyond the contract (which is per machine type): the bits are the same on all of them."""
    x, w = normal(7, 130, dtype=dtype), normal(100, 130)
    results = on_each_isa(lambda: linear(x, w, packs=PackCache(), segments=8))
    assert all(torch.equal(result, results["portable"]) for result in results.values())


@pytest.mark.parametrize("shape", [(1, 5, 3), (7, 66, 33), (37, 576, 130)], ids=str)
def test_gradients(isa, dtype, normal, assert_close, shape):
    t, k, n = shape
    x, w, bias = (
        normal(t, k, dtype=dtype).requires_grad_(),
        normal(n, k).requires_grad_(),
        normal(n).requires_grad_(),
    )
    dy = normal(t, n, dtype=dtype)
    linear(x, w, bias, packs=PackCache()).backward(dy)
    assert_close(x.grad, dy.double() @ w.detach().to(dtype).double(), scale=8)
    assert w.grad.dtype == bias.grad.dtype == torch.float32
    assert_close(w.grad, dy.double().t() @ x.detach().double(), scale=8)
    assert_close(bias.grad, dy.double().sum(0), scale=8)


def test_packs_follow_the_weight(normal):
    x, w, packs = normal(2, 8), normal(4, 8), PackCache()
    before = linear(x, w, packs=packs)
    with torch.no_grad():
        w.mul_(2.0)
    assert torch.equal(linear(x, w, packs=packs), before * 2)


def test_op_is_well_formed(normal):
    x, w = normal(3, 8).requires_grad_(), normal(4, 8).requires_grad_()
    packed = PackCache().get([w], torch.float32).data
    torch.library.opcheck(torch.ops.lockstep.linear.default, (x, [w], [], packed, None, 1, False))


def test_a_product_is_added_once(isa, dtype, normal):
    """Narrower instruction sets once computed a panel's columns again for each of its vectors."""
    x, w, y = normal(3, 64, dtype=dtype), normal(128, 64), normal(3, 128)
    packed = cpu.pack_temporary(w, dtype)
    product = cpu.gemm(x, packed, 128, out_dtype=torch.float32)
    assert torch.equal(cpu.gemm(x, packed, 128, out=y.clone(), accumulate=True), y + product)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 49, 17), (64, 97, 130), (2051, 16, 65)], ids=str)
def test_weight_gradient_is_one_chain_of_sums(isa, dtype, normal, assert_close, shape):
    """Against fp64; and a T cut into micro-batches, each added in place, gives the whole's bits."""
    t, n, k = shape
    dy, x = normal(t, n, dtype=dtype), normal(t, k, dtype=dtype)
    whole = cpu.linear_grad_weight(dy, x)
    assert_close(whole, dy.double().t() @ x.double(), scale=8)
    parts = torch.full_like(whole, float("nan"))
    cut = t // 2 // 2 * 2  # between pairs
    cpu.add_grad_weight(parts, dy[:cut], x[:cut], accumulate=False)
    cpu.add_grad_weight(parts, dy[cut:], x[cut:], accumulate=True)
    assert torch.equal(parts, whole)


def test_weight_gradients_agree_across_instruction_sets_and_threads(dtype, normal):
    dy, x = normal(333, 130, dtype=dtype), normal(333, 90, dtype=dtype)
    best, before = kernels.isa(), kernels.num_threads()
    results = []
    try:
        for name in ("portable", best):
            kernels.force_isa(name)
            for threads in (1, 2):
                kernels.set_num_threads(threads)
                results.append(cpu.linear_grad_weight(dy, x))
    finally:
        kernels.force_isa(best)
        kernels.set_num_threads(before)
    assert all(torch.equal(other, results[0]) for other in results)


@pytest.mark.parametrize("n", [1, 63, 64, 130])
@pytest.mark.parametrize("k", [1, 2, 63, 65, 129])
def test_packing_is_the_same_from_either_layout(dtype, normal, n, k):
    rows = normal(n, k)
    columns = rows.t().contiguous().t()
    spaced = torch.empty(n, 2 * k)[:, ::2].copy_(rows)
    packed = [cpu.pack_temporary(matrix, dtype) for matrix in (rows, columns, spaced)]
    assert torch.equal(packed[0], packed[1])
    assert torch.equal(packed[0], packed[2])
