"""Attention: packed and paged against fp64, gradients, groups and windows, and their agreement to
the bit.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from lockstep import kernels
from lockstep.kernels.attention import (
    BLOCK,
    attention_packed,
    attention_paged,
    padded_head_dim,
    reference,
)

CASES = [  # query heads, kv heads, head dim, window
    (1, 1, 16, 0),
    (9, 3, 64, 0),
    (4, 4, 24, 0),
    (14, 2, 64, 0),
    (6, 3, 32, 20),
    (8, 1, 8, 130),
]
LENGTHS = [1, 2, 16, 37, 129, 300]


def inputs(normal, dtype, n, k, h, total):
    return (
        normal(total, n, h, dtype=dtype),
        normal(total, k, h, dtype=dtype),
        normal(total, k, h, dtype=dtype),
    )


def cumulative(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_matches_fp64(isa, dtype, normal, assert_close, case):
    n, k, h, window = case
    q, keys, values = inputs(normal, dtype, n, k, h, sum(LENGTHS))
    cu = cumulative(LENGTHS)
    o = attention_packed(q, keys, values, cu, scale=h**-0.5, window=window)
    want, lse = reference.attention_packed(
        q.float(), keys.float(), values.float(), cu, h**-0.5, window
    )
    assert_close(o, want, scale=2)
    _, got_lse = torch.ops.lockstep.attention_packed(q, keys, values, cu, h**-0.5, window)
    assert_close(got_lse, lse, scale=2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(isa, dtype, normal, assert_close, case):
    n, k, h, window = case
    lengths = [1, 19, 130]
    tensors = [x.requires_grad_() for x in inputs(normal, dtype, n, k, h, sum(lengths))]
    do = normal(sum(lengths), n, h, dtype=dtype)
    cu = cumulative(lengths)
    attention_packed(*tensors, cu, scale=h**-0.5, window=window).backward(do)
    exact = [x.detach().float().requires_grad_() for x in tensors]
    o, _ = reference.attention_packed(*exact, cu, h**-0.5, window)
    o.backward(do.float())
    for got, want in zip(tensors, exact, strict=True):
        assert_close(got.grad, want.grad, scale=4)


def paged(q, k, v, *, chunks, window, pages=None):
    """One sequence through pages in a shuffled order, chunk by chunk."""
    total, num_kv, h = k.shape
    num_blocks = -(-total // BLOCK)
    table = torch.randperm(num_blocks + 3, generator=torch.Generator().manual_seed(1))[
        :num_blocks
    ].int()[None]
    k_pages = torch.full((num_blocks + 3, num_kv, h, BLOCK), float("nan"), dtype=k.dtype)
    v_pages = torch.full(
        (num_blocks + 3, num_kv, BLOCK, padded_head_dim(h)), float("nan"), dtype=k.dtype
    )
    outputs, done = [], 0
    for size in chunks:
        part = slice(done, done + size)
        outputs.append(
            attention_paged(
                q[part],
                k[part],
                v[part],
                k_pages,
                v_pages,
                block_tables_SB=table,
                query_starts_S1=torch.tensor([0, len(q[part])], dtype=torch.int32),
                context_lens_S=torch.tensor([done], dtype=torch.int32),
                scale=h**-0.5,
                window=window,
            )
        )
        done += len(q[part])
    return torch.cat(outputs)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_paged_equals_packed_whatever_the_chunks(dtype, normal, case, threads):
    """Pages hold NaN wherever nothing was written: no row may read past what it may see."""
    n, k, h, window = case
    q, keys, values = inputs(normal, dtype, n, k, h, 277)
    before = kernels.num_threads()
    packed = attention_packed(q, keys, values, cumulative([277]), scale=h**-0.5, window=window)
    try:
        kernels.set_num_threads(threads)
        for chunks in ([277], [1] * 277, [7] * 40, [64] * 5, [128, 149], [200, 1, 76]):
            assert torch.equal(paged(q, keys, values, chunks=chunks, window=window), packed), (
                chunks[:3]
            )
    finally:
        kernels.set_num_threads(before)


def test_sequences_are_blind_to_each_other(dtype, normal):
    n, k, h = 9, 3, 64
    q, keys, values = inputs(normal, dtype, n, k, h, sum(LENGTHS))
    cu = cumulative(LENGTHS)
    together = attention_packed(q, keys, values, cu, scale=0.125)
    for start, end in itertools.pairwise(cu.tolist()):
        part = slice(start, end)
        alone = attention_packed(
            q[part], keys[part], values[part], cumulative([end - start]), scale=0.125
        )
        assert torch.equal(together[part], alone)


def test_a_flipped_bit_shows(dtype, normal):
    """The comparison above can fail: the lowest bit of one value changes the output."""
    q, keys, values = inputs(normal, dtype, 3, 1, 64, 40)
    before = attention_packed(q, keys, values, cumulative([40]), scale=0.125)
    bits = values.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits[0] ^= 1
    assert not torch.equal(attention_packed(q, keys, values, cumulative([40]), scale=0.125), before)


def test_reference_paged_equals_its_packed(normal):
    q, keys, values = inputs(normal, torch.float32, 4, 2, 16, 50)
    with kernels.use_reference():
        packed = attention_packed(q, keys, values, cumulative([50]), scale=0.25)
        assert torch.allclose(paged(q, keys, values, chunks=[20, 30], window=0), packed, atol=1e-6)


def test_op_is_well_formed(normal):
    q, keys, values = (x.requires_grad_() for x in inputs(normal, torch.float32, 4, 2, 16, 9))
    arguments = (q, keys, values, cumulative([4, 5]), 0.25, 0)
    torch.library.opcheck(torch.ops.lockstep.attention_packed.default, arguments)
