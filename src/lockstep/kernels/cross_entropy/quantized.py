"""Logprobs through a quantised last projection, in chunks of rows, logits never whole.

The same passes as the float kernel's, around the quantised product; the backward pass computes a
chunk's logits again and goes straight through the rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.core.quantization import WeightScheme
from lockstep.kernels.linear import PackCache, Weight, linear

_CHUNK = 64


class QuantizedLogprobs(torch.autograd.Function):
    """(logprobs, logsumexp, entropy) of each row, as `lockstep::token_logprobs` gives them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        master_VD: Tensor | None,
        weight: Weight,
        packs: PackCache,
        scheme: WeightScheme | None,
        targets_T: Tensor,
        inverse_temperature_T: Tensor,
        row_logprobs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(hidden_TD, targets_T, inverse_temperature_T)
        ctx.weight, ctx.packs, ctx.scheme = weight, packs, scheme
        parts = []
        for start in range(0, len(hidden_TD), _CHUNK):
            rows = slice(start, start + _CHUNK)
            logits_TV = linear(hidden_TD[rows], weight, packs=packs, scheme=scheme, fp32_out=True)
            parts.append(row_logprobs(logits_TV, targets_T[rows], inverse_temperature_T[rows]))
        logprobs, lse, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.lse_T = lse
        ctx.mark_non_differentiable(lse, entropy)
        return logprobs, lse, entropy

    @staticmethod
    def backward(
        ctx: Any, dlogprobs_T: Tensor, _dlse: Tensor, _dentropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_TD, targets_T, scale_T = ctx.saved_tensors
        packed = ctx.packs.get([ctx.weight], hidden_TD.dtype, scheme=ctx.scheme)
        weight_VD = packed.quantized.dequantize(hidden_TD.dtype)
        dhidden_TD = torch.empty_like(hidden_TD)
        dmaster_VD = torch.zeros(weight_VD.shape) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden_TD), _CHUNK):
            rows = slice(start, start + _CHUNK)
            logits_TV = linear(
                hidden_TD[rows], ctx.weight, packs=ctx.packs, scheme=ctx.scheme, fp32_out=True
            )
            dlogits_TV = logits_TV.mul_(scale_T[rows, None]).sub_(ctx.lse_T[rows, None])
            dlogits_TV.exp_().neg_()
            dlogits_TV[torch.arange(len(dlogits_TV)), targets_T[rows]] += 1.0
            dlogits_TV *= (scale_T[rows] * dlogprobs_T[rows])[:, None]
            dlogits_TV = dlogits_TV.to(hidden_TD.dtype)
            dhidden_TD[rows] = torch.ops.lockstep.linear_grad_input(dlogits_TV, weight_VD)
            if dmaster_VD is not None:
                dmaster_VD += torch.ops.lockstep.linear_grad_weight(dlogits_TV, hidden_TD[rows])
        return dhidden_TD, dmaster_VD, *[None] * 6
