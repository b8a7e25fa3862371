"""Native cross-entropy fused with the last projection, in chunks of rows, so the logits are never
whole.

A chunk of logits stays in cache between the product and the row pass; the backward pass computes it
again. Chunks are 64 rows, or 256 where the weight's gradient is summed too (it is read and written
once a chunk).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.linear.cpu import gemm, pack_temporary
from lockstep.kernels.native_library import DTYPE_CODE, native

_CHUNK, _CHUNK_WITH_WEIGHT_GRAD = 64, 256


def row_logprobs(
    logits_TV: Tensor, targets_T: Tensor, inverse_temperature_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    t, v = logits_TV.shape
    logits_TV = logits_TV.contiguous()
    logprobs, lse, entropy = (torch.empty(t, dtype=torch.float32) for _ in range(3))
    native().ls_row_logprobs(
        logprobs.data_ptr(),
        lse.data_ptr(),
        entropy.data_ptr(),
        logits_TV.data_ptr(),
        targets_T.data_ptr(),
        inverse_temperature_T.data_ptr(),
        t,
        v,
    )
    return logprobs, lse, entropy


def token_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    packed: Tensor,
    targets_T: Tensor,
    inverse_temperature_T: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    vocab_size = weight_VD.shape[0]
    parts = []
    for hidden, targets, scale in zip(
        hidden_TD.split(_CHUNK),
        targets_T.split(_CHUNK),
        inverse_temperature_T.split(_CHUNK),
        strict=True,
    ):
        logits = gemm(hidden, packed, vocab_size, out_dtype=torch.float32)
        parts.append(row_logprobs(logits, targets, scale))
    logprobs, lse, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, lse, entropy


def token_logprobs_backward(
    dlogprobs_T: Tensor,
    hidden_TD: Tensor,
    weight_VD: Tensor,
    packed: Tensor,
    targets_T: Tensor,
    inverse_temperature_T: Tensor,
    lse_T: Tensor,
    weight_needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    vocab_size, dtype = weight_VD.shape[0], hidden_TD.dtype
    packed_for_input = pack_temporary(weight_VD.t(), dtype)
    dhidden_TD = torch.empty_like(hidden_TD)
    dweight_VD = torch.zeros(weight_VD.shape if weight_needs_grad else 0, dtype=torch.float32)
    chunk = _CHUNK_WITH_WEIGHT_GRAD if weight_needs_grad else _CHUNK
    for start in range(0, hidden_TD.shape[0], chunk):
        rows = slice(start, start + chunk)
        hidden = hidden_TD[rows].contiguous()
        logits = gemm(hidden, packed, vocab_size, out_dtype=torch.float32)
        dlogits = logits if dtype == torch.float32 else torch.empty(logits.shape, dtype=dtype)
        native().ls_row_softmax_grad(
            dlogits.data_ptr(),
            DTYPE_CODE[dtype],
            logits.data_ptr(),
            lse_T[rows].data_ptr(),
            targets_T[rows].data_ptr(),
            inverse_temperature_T[rows].data_ptr(),
            dlogprobs_T[rows].data_ptr(),
            logits.shape[0],
            vocab_size,
        )
        gemm(dlogits, packed_for_input, hidden.shape[1], out=dhidden_TD[rows])
        if weight_needs_grad:
            gemm(
                dlogits.t().contiguous(),
                pack_temporary(hidden.t(), dtype),
                hidden.shape[1],
                out=dweight_VD,
                accumulate=True,
            )
    return dhidden_TD, dweight_VD
