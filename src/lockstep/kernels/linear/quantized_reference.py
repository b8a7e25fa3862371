"""Products with quantised weights: the specification of `lockstep::quantized_linear`.

Activations are quantised per row and block of 64 inputs: with m = max |x| of a block, s = m / 127
and q = round-half-even(x * (127 / m)), both divisions and the product in fp32. A block in which
127 / m is not finite (m is 0 or below 2^-121) has q = 0; one that holds an infinity or a NaN has
s = NaN, so that the row becomes NaN. Weight groups cut a block into pieces; with I the integer
product of a piece and S the sum of its q,

    P_b = sum over pieces of  sw float(I) [+ mw float(S)]     first term a mul, the others fma
    acc = fma(s_b, P_b, acc)                                  b ascending within a segment

in fp32; segments are joined by the tree of the float product. Where a channel has one scale, P_b =
float(I) and the scale multiplies once, after the tree. Zero points are taken off in integers. With
activations of 16 bits the sums of pieces are float and acc = fma(sw, sum, acc). Bias comes last,
then rounding. Legend: T rows, K inputs, N outputs, B blocks, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep.core.quantization import ACTIVATION_BLOCK
from lockstep.kernels.linear.formats import QuantizedWeight
from lockstep.kernels.linear.reference import join_segments


def quantize_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """q (T, K) int8 and scales (T, B) fp32."""
    t, k = x_TK.shape
    padded = torch.nn.functional.pad(x_TK.float(), (0, -k % ACTIVATION_BLOCK))
    x_TBI = padded.view(t, -1, ACTIVATION_BLOCK)
    largest_TB = x_TBI.abs().amax(2)
    scales_TB = torch.where(largest_TB.isfinite(), largest_TB / 127, torch.nan)
    # `127 / tensor` would be a reciprocal and a product: rounded twice
    factors_TB = torch.tensor(127.0) / largest_TB
    q_TBI = (x_TBI * factors_TB[..., None]).round()
    usable_TB1 = (factors_TB.isfinite() & (factors_TB > 0))[..., None]
    q_TBI = torch.where(usable_TB1, q_TBI, 0.0).clamp(-127, 127)
    return q_TBI.to(torch.int8).flatten(1)[:, :k], scales_TB


def linear(x_TK: Tensor, weight: QuantizedWeight, bias_N: Tensor | None, segments: int) -> Tensor:
    """fp32 result; `bias_N` is fp32 already rounded to x's dtype."""
    multiply = _int_segment if weight.scheme.activation_bits == 8 else _float_segment
    y_TN = join_segments([multiply(x_TK, weight, *cut) for cut in _segments(x_TK, segments)])
    if weight.scheme.group_size is None:
        y_TN = y_TN * weight.group_scales()[:, 0]
    return y_TN if bias_N is None else y_TN + bias_N


def _segments(x_TK: Tensor, segments: int) -> Iterator[tuple[int, int]]:
    """First and last input of each segment, whole blocks."""
    k = x_TK.shape[1]
    num_blocks = -(-k // ACTIVATION_BLOCK)
    length = -(-num_blocks // segments) * ACTIVATION_BLOCK
    for i in range(segments):
        yield min(i * length, k), min((i + 1) * length, k)


def _int_segment(x_TK: Tensor, weight: QuantizedWeight, begin: int, end: int) -> Tensor:
    q_TK, scales_TB = quantize_rows(x_TK)
    q_TK, integers_NK = q_TK.float(), weight.integers()
    scales_NG, minimums_NG = weight.group_scales(), weight.group_minimums()
    acc = torch.zeros(x_TK.shape[0], weight.shape[0])
    for block in range(begin, end, ACTIVATION_BLOCK):
        total: Tensor | None = None
        for first, last in _pieces(weight, block, min(block + ACTIVATION_BLOCK, end)):
            product = q_TK[:, first:last] @ integers_NK[:, first:last].t()  # exact: below 2^24
            if weight.scheme.group_size is None:
                total = product
                continue
            group = first // weight.scheme.group_size
            scale = scales_NG[:, group]
            total = product * scale if total is None else fma(product, scale, total)
            if minimums_NG is not None:
                row_sums = q_TK[:, first:last].sum(1, keepdim=True)
                total = fma(row_sums, minimums_NG[:, group], total)
        assert total is not None
        acc = fma(scales_TB[:, block // ACTIVATION_BLOCK, None], total, acc)
    return acc


def _float_segment(x_TK: Tensor, weight: QuantizedWeight, begin: int, end: int) -> Tensor:
    x, integers_NK = x_TK.float(), weight.integers()
    scales_NG, minimums_NG = weight.group_scales(), weight.group_minimums()
    size = weight.scheme.group_size
    if size is None:
        return x[:, begin:end] @ integers_NK[:, begin:end].t()
    acc = torch.zeros(x.shape[0], weight.shape[0])
    for first, last in _pieces(weight, begin, end, whole_groups=True):
        group = first // size
        product = x[:, first:last] @ integers_NK[:, first:last].t()
        acc = fma(product, scales_NG[:, group], acc)
        if minimums_NG is not None:
            acc = fma(x[:, first:last].sum(1, keepdim=True), minimums_NG[:, group], acc)
    return acc


def _pieces(
    weight: QuantizedWeight, begin: int, end: int, *, whole_groups: bool = False
) -> Iterator[tuple[int, int]]:
    """Runs of inputs with one scale, cut at blocks unless `whole_groups`."""
    size = weight.scheme.group_size
    if size is None or (size >= ACTIVATION_BLOCK and not whole_groups):
        yield begin, end
        return
    while begin < end:
        stop = min((begin // size + 1) * size, end)
        yield begin, stop
        begin = stop


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c in fp32 with one rounding.

    The product is exact in fp64. The sum is rounded to odd there (Boldo & Melquiond 2008), after
    which rounding to fp32 gives what one rounding would have.
    """
    product = a.double() * b.double()
    addend = c.double().expand_as(product)
    total = product + addend
    high = total - product
    error = (product - (total - high)) + (addend - high)
    bits = total.view(torch.int64)
    is_even_and_inexact = (bits & 1 == 0) & (error != 0) & error.isfinite() & total.isfinite()
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(is_even_and_inexact, bits + step, bits).view(torch.float64).float()
