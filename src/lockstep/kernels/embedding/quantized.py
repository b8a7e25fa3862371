"""Rows of a quantised table, dequantised to the compute dtype.

A row has the values the last projection multiplies with where the two are tied. For an fp32 master
that a scheme rounds on the fly the gradient goes straight through to the master.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError
from lockstep.core.quantization import WeightScheme
from lockstep.kernels.embedding import cpu, embedding
from lockstep.kernels.linear import PackCache, QuantizedWeight, quantize_rtn, runs_natively
from lockstep.kernels.linear.packs import RELEASED, is_released


def quantized_embedding(
    weight: QuantizedWeight | Tensor,
    tokens_T: Tensor,
    *,
    dtype: torch.dtype,
    packs: PackCache,
    scheme: WeightScheme | None = None,
) -> Tensor:
    """Rows (T, D) for int64 tokens; `scheme` is how a float table is rounded. Without gradients
    they come from what is packed in `packs`, as for a product.
    """
    if runs_natively(tokens_T):
        packed = packs.get([weight], dtype, scheme=scheme)
        return cpu.embedding_quantized(packed, tokens_T, weight.shape, dtype)
    if isinstance(weight, QuantizedWeight):
        if is_released(weight):
            raise ConfigError(RELEASED)
        return weight.rows(tokens_T).dequantize(dtype)
    assert scheme is not None, "a float table without a scheme is `embedding`'s"
    return _RoundedRows.apply(weight, tokens_T, dtype, scheme)


class _RoundedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, master_VD: Tensor, tokens_T: Tensor, dtype: torch.dtype, scheme: WeightScheme
    ) -> Tensor:
        ctx.save_for_backward(master_VD, tokens_T)
        return quantize_rtn(master_VD[tokens_T], scheme).dequantize(dtype)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, None, None, None]:
        master_VD, tokens_T = ctx.saved_tensors
        with torch.enable_grad():
            rows_TD = embedding(master_VD, tokens_T, dtype=dy_TD.dtype)
        return torch.autograd.grad(rows_TD, master_VD, dy_TD)[0], None, None, None
