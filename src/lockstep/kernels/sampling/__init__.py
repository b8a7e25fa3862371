"""Drawing tokens. The noise of a draw is a pure function of (seed, position, token id): no
generator state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels import dispatch
from lockstep.kernels.sampling import cpu, reference

__all__ = ["SampleResult", "sample"]


@dataclass(frozen=True)
class SampleResult:
    """Drawn tokens (int64) and the log-probabilities with which they were drawn (fp32)."""

    token_ids_S: Tensor
    sampling_logprobs_S: Tensor


_sample = dispatch.define(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,"
    " Tensor seed,"
    " Tensor position) -> (Tensor, Tensor)",
    reference=reference.sample,
    native=cpu.sample,
    fake=lambda logits, *_: (
        logits.new_empty(logits.shape[0], dtype=torch.int64),
        logits.new_empty(logits.shape[0], dtype=torch.float32),
    ),
)


def sample(
    logits_SV: Tensor,
    *,
    temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    min_p_S: Tensor,
    seed_S: Tensor,
    position_S: Tensor,
) -> SampleResult:
    """One token a row of fp32 logits. top_k 0 and top_p 1 and min_p 0 keep all; seed and position
    are int64.
    """
    tokens, logprobs = _sample(
        logits_SV,
        temperature_S.to(torch.float32),
        top_k_S.to(torch.int64),
        top_p_S.to(torch.float32),
        min_p_S.to(torch.float32),
        seed_S.to(torch.int64),
        position_S.to(torch.int64),
    )
    return SampleResult(tokens, logprobs)
