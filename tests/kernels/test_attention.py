"""Attention: packed and paged against fp64, gradients, groups and windows, KV formats, and their
agreement to the bit.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lockstep import kernels
from lockstep.core.errors import ConfigError
from lockstep.kernels import native_library
from lockstep.kernels.attention import (
    BLOCK,
    attention_packed,
    attention_paged,
    attention_scored,
    empty_pages,
    native_format,
    reference,
)
from lockstep.kernels.attention.pages import quantise
from lockstep.models.attention import kv_format_for

CASES = [  # query heads, kv heads, head dim, window
    (1, 1, 16, 0),
    (9, 3, 64, 0),
    (4, 4, 24, 0),
    (14, 2, 64, 0),
    (9, 1, 80, 0),
    (4, 1, 96, 33),
    (3, 1, 128, 0),
    (6, 3, 32, 20),
    (8, 1, 8, 130),
]
LENGTHS = [1, 2, 3, 17, 37, 127, 129, 300]
FORMATS = ["bf16", "int8", "fp8"]


def inputs(normal, dtype, n, k, h, total):
    return (
        normal(total, n, h, dtype=dtype),
        normal(total, k, h, dtype=dtype),
        normal(total, k, h, dtype=dtype),
    )


def cumulative(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def plain_turn(n):
    """Tables that leave heads as they are: cos 1, sin 0."""
    return torch.zeros(n, dtype=torch.int64), torch.ones(1, 64), torch.zeros(1, 64)


def fused(tensors):
    q, k, v = tensors
    return torch.cat((q, k, v), dim=1).flatten(1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_matches_fp64(isa, dtype, normal, assert_close, case):
    n, k, h, window = case
    q, keys, values = inputs(normal, dtype, n, k, h, sum(LENGTHS))
    cu = cumulative(LENGTHS)
    o = attention_packed(q, keys, values, cu, scale=h**-0.5, window=window)
    exact = (x.double() for x in (q, keys, values))
    want, lse = reference._attend_packed(*exact, cu, h**-0.5, window)
    assert_close(o, want, scale=2)
    arguments = (q, keys, values, cu, h**-0.5, window, native_format(dtype))
    _, got_lse = torch.ops.lockstep.attention_packed(*arguments)
    assert (got_lse - lse).abs().max() < (2e-5 if dtype == torch.bfloat16 else 4e-6)


@pytest.mark.parametrize("window", [0, 700])
def test_ranges_of_a_long_context(isa, dtype, normal, assert_close, window):
    """4,099 keys are five ranges; 17 rows of one sequence, which split over threads."""
    length, rows = 4099, 17
    q, keys, values = inputs(normal, dtype, 3, 1, 64, length)
    one = paged(q, keys, values, chunks=[length - rows, rows], window=window)
    exact = (x.double() for x in (q, keys, values))
    want, _ = reference._attend_packed(*exact, cumulative([length]), 0.125, window)
    assert_close(one, want.flatten(1), scale=2)


def test_error_is_that_of_sdpa_in_bf16(normal):
    q, keys, values = inputs(normal, torch.bfloat16, 9, 3, 64, 700)
    want, _ = reference._attend_packed(
        *(x.double() for x in (q, keys, values)), cumulative([700]), 0.125, 0
    )
    ours = attention_packed(q, keys, values, cumulative([700]), scale=0.125)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, keys, values)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    ours_rms, theirs_rms = ((x.double() - want).square().mean().sqrt() for x in (ours, theirs))
    assert ours_rms < 1.1 * theirs_rms


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("case", [(9, 3, 64, 0), (4, 1, 24, 20)], ids=str)
def test_formats_match_the_specification(isa, dtype, normal, assert_close, kv_format, case):
    n, k, h, window = case
    q, keys, values = inputs(normal, dtype, n, k, h, sum(LENGTHS))
    cu = cumulative(LENGTHS)
    o = attention_packed(q, keys, values, cu, scale=h**-0.5, window=window, kv_format=kv_format)
    arguments = (q.float(), keys, values, cu, h**-0.5, window, kv_format)
    assert_close(o, reference.attention_packed(*arguments)[0], scale=2)


def test_quantised_values_are_torchs(normal):
    x = normal(100, 3, 64) * normal(100, 3, 1)
    for kv_format, largest in (("int8", 127.0), ("fp8", 448.0)):
        codes, scales = quantise(x, kv_format)
        error = (codes.float() * scales[..., None] - x).abs()
        step = scales if kv_format == "int8" else x.abs().amax(-1) / 14  # codes 416 and 448
        assert (error <= step[..., None] / 2 * 1.001).all()
        assert codes.float().abs().max() == largest


def test_a_wider_cache_than_the_model_is_refused():
    with pytest.raises(ConfigError, match="computes in bf16"):
        kv_format_for(torch.bfloat16, "fp32")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(isa, dtype, normal, assert_close, case):
    n, k, h, window = case
    lengths = [1, 19, 130]
    tensors = [x.requires_grad_() for x in inputs(normal, dtype, n, k, h, sum(lengths))]
    do = normal(sum(lengths), n, h, dtype=dtype)
    cu = cumulative(lengths)
    attention_packed(*tensors, cu, scale=h**-0.5, window=window).backward(do)
    exact = [x.detach().float().requires_grad_() for x in tensors]
    o, _ = reference._attend_packed(*exact, cu, h**-0.5, window)
    o.backward(do.float())
    for got, want in zip(tensors, exact, strict=True):
        assert_close(got.grad, want.grad, scale=4)


def paged(q, k, v, *, chunks, window, kv_format=None):
    """One sequence through pages in a shuffled order, chunk by chunk; (T, N * H)."""
    total, num_kv, h = k.shape
    num_blocks = -(-total // BLOCK)
    order = torch.randperm(num_blocks + 3, generator=torch.Generator().manual_seed(1))
    table = order[:num_blocks].int()[None]

    def unwritten(shape, dtype):
        tensor = torch.empty(shape, dtype=dtype)
        tensor.view(torch.uint8).fill_(0xFF)  # NaN in every floating format
        return tensor

    kv_format = kv_format or native_format(k.dtype)
    pages = empty_pages(num_blocks + 3, num_kv, h, kv_format, unwritten)
    positions, cos, sin = plain_turn(total)
    outputs, done = [], 0
    for size in chunks:
        part = slice(done, done + size)
        tokens = len(q[part])
        outputs.append(
            attention_paged(
                fused((q[part], k[part], v[part])),
                positions[part],
                cos[:, : h // 2],
                sin[:, : h // 2],
                pages,
                q_norm_H=None,
                k_norm_H=None,
                eps=0.0,
                block_tables_SB=table,
                query_starts_S1=torch.tensor([0, tokens], dtype=torch.int32),
                context_lens_S=torch.tensor([done], dtype=torch.int32),
                num_heads=q.shape[1],
                num_kv_heads=num_kv,
                scale=h**-0.5,
                window=window,
            )
        )
        done += tokens
    return torch.cat(outputs)


@pytest.mark.parametrize("kv_format", [None, "int8", "fp8"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_paged_equals_packed_whatever_the_chunks(dtype, normal, case, threads, kv_format):
    """Pages hold NaN wherever nothing was written: no row may read past what it may see."""
    n, k, h, window = case
    q, keys, values = inputs(normal, dtype, n, k, h, 277)
    before = kernels.num_threads()
    packed = attention_packed(
        q, keys, values, cumulative([277]), scale=h**-0.5, window=window, kv_format=kv_format
    ).flatten(1)
    assert packed.isfinite().all()
    options = {"window": window, "kv_format": kv_format}
    try:
        kernels.set_num_threads(threads)
        for chunks in ([277], [1] * 277, [7] * 40, [128, 149], [200, 1, 76]):
            assert torch.equal(paged(q, keys, values, chunks=chunks, **options), packed), chunks[:3]
    finally:
        kernels.set_num_threads(before)


@pytest.mark.parametrize("kv_format", [None, "int8"])
def test_long_contexts_have_the_same_bits_on_any_threads(dtype, normal, kv_format):
    """Decode splits the ranges of 2,600 keys over threads; prefill runs through them."""
    q, keys, values = inputs(normal, dtype, 6, 2, 32, 2600)
    options = {"window": 0, "kv_format": kv_format}
    packed = attention_packed(
        q, keys, values, cumulative([2600]), scale=32**-0.5, kv_format=kv_format
    ).flatten(1)
    before = kernels.num_threads()
    try:
        for threads in (1, 2, 3):
            kernels.set_num_threads(threads)
            for chunks in ([2560, *[1] * 40], [1000, 1048, 5, 547]):
                assert torch.equal(paged(q, keys, values, chunks=chunks, **options), packed)
    finally:
        kernels.set_num_threads(before)


def test_all_instruction_sets_have_the_same_bits(dtype, normal):
    """Subnormal, huge and non-finite numbers among the plain ones."""
    q, keys, values = inputs(normal, dtype, 9, 3, 64, 1100)
    for x in (q, keys, values):
        x[3::7] *= 2.0**-120
        x[5::7] *= 1e-39
    keys[900], values[950] = math.inf, math.nan
    best, results = kernels.isa(), []
    try:
        for name in [name for name, lacking in native_library.isas().items() if not lacking]:
            kernels.force_isa(name)
            for kv_format in (None, "int8", "fp8"):
                results.append(
                    attention_packed(
                        q, keys, values, cumulative([1100]), scale=0.125, kv_format=kv_format
                    ).nan_to_num(nan=777.0)
                )
    finally:
        kernels.force_isa(best)
    for i, result in enumerate(results):
        assert torch.equal(result, results[i % 3])


@pytest.mark.parametrize("kv_format", [None, "int8", "fp8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_where_it_is_seen_and_nowhere_else(
    isa, dtype, normal, bad, kv_format
):
    tensors = inputs(normal, dtype, 6, 2, 64, 120)
    cu = cumulative([50, 70])
    clean = attention_packed(*tensors, cu, scale=0.125, kv_format=kv_format)
    rows = (slice(20, 21), slice(20, 50), slice(20, 50))
    for spoiled, seen_by in zip(tensors, rows, strict=True):
        before = spoiled[20].clone()
        spoiled[20] = bad
        o = attention_packed(*tensors, cu, scale=0.125, kv_format=kv_format)
        spoiled[20] = before
        assert not o[seen_by].isfinite().any(-1).any()
        o[seen_by] = clean[seen_by]
        assert torch.equal(o, clean)


@pytest.mark.parametrize("spoiled", range(4))
def test_what_is_not_finite_reaches_the_gradients_that_see_it(isa, dtype, normal, spoiled):
    """q, k, v or the gradient of o is NaN at token 20 of 50. What its sequence hides from it is
    multiplied by 0, so more of it may be NaN; the next sequence stays clean.
    """
    tensors = [x.requires_grad_() for x in inputs(normal, dtype, 6, 2, 64, 120)]
    do = normal(120, 6, 64, dtype=dtype)
    with torch.no_grad():
        [*tensors, do][spoiled][20] = math.nan
    attention_packed(*tensors, cumulative([50, 70]), scale=0.125).backward(do)
    dq, dk, dv = (x.grad for x in tensors)
    rows, keys = (slice(20, 50), 50) if spoiled in (1, 2) else (slice(20, 21), 21)
    assert dq[rows].isnan().all()
    assert dk[:keys].isnan().all()
    assert dv[:keys].isnan().all() or spoiled == 2  # the weights do not depend on values
    for gradient in (dq, dk, dv):
        assert gradient[50:].isfinite().all()


def test_rows_behind_the_last_chunk_give_zero(dtype, normal):
    tensors = inputs(normal, dtype, 3, 1, 16, 9)
    positions, cos, sin = plain_turn(9)
    o = attention_scored(
        fused(tensors),
        positions,
        cos[:, :8],
        sin[:, :8],
        q_norm_H=None,
        k_norm_H=None,
        eps=0.0,
        cu_seqlens_S1=torch.tensor([0, 4, 4, 6, 6], dtype=torch.int32),
        num_heads=3,
        num_kv_heads=1,
        scale=0.25,
    )
    want = attention_packed(*(x[:6] for x in tensors), cumulative([4, 2]), scale=0.25)
    assert torch.equal(o[:6], want.flatten(1))
    assert not o[6:].any()


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
        got = paged(q, keys, values, chunks=[20, 30], window=0)
        assert torch.allclose(got, packed.flatten(1), atol=1e-6)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_reference_pages_give_back_what_the_packed_form_sees(dtype, normal, kv_format):
    q, keys, values = inputs(normal, dtype, 4, 2, 16, 50)
    with kernels.use_reference():
        packed = attention_packed(
            q, keys, values, cumulative([50]), scale=0.25, kv_format=kv_format
        )
        got = paged(q, keys, values, chunks=[20, 30], window=0, kv_format=kv_format)
    assert torch.allclose(got, packed.flatten(1), atol=1e-6)


def test_op_is_well_formed(normal):
    q, keys, values = (x.requires_grad_() for x in inputs(normal, torch.float32, 4, 2, 16, 9))
    arguments = (q, keys, values, cumulative([4, 5]), 0.25, 0, "fp32")
    torch.library.opcheck(torch.ops.lockstep.attention_packed.default, arguments)
