"""Native sampling: rows over threads; noise is made only for tokens that could still win.

A token can win only if its scaled logit is within the noise's range (19.5) of the best one, so most
of the vocabulary needs no noise at all, and the result is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.native_library import native


def sample(
    logits_SV: Tensor,
    temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    min_p_S: Tensor,
    seed_S: Tensor,
    position_S: Tensor,
) -> tuple[Tensor, Tensor]:
    logits_SV = logits_SV.contiguous()
    tokens_S = torch.empty(logits_SV.shape[0], dtype=torch.int64)
    logprobs_S = torch.empty(logits_SV.shape[0], dtype=torch.float32)
    native().ls_sample(
        tokens_S.data_ptr(),
        logprobs_S.data_ptr(),
        logits_SV.data_ptr(),
        temperature_S.data_ptr(),
        top_k_S.data_ptr(),
        top_p_S.data_ptr(),
        min_p_S.data_ptr(),
        seed_S.data_ptr(),
        position_S.data_ptr(),
        *logits_SV.shape,
    )
    return tokens_S, logprobs_S
