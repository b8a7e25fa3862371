"""What a request asks to be done to its logits before a token is drawn from them.

Everything here is elementwise on one row, so a row's result cannot depend on its neighbours.
Temperature and truncation belong to the draw itself (`lockstep.kernels.sampling`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from lockstep.core.sampling import SamplingParams


def changes_logits(params: SamplingParams, *, num_output: int) -> bool:
    """Whether `adjust` would change anything."""
    return (
        num_output < params.min_tokens
        or bool(params.logit_bias)
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def adjust(
    logits_V: Tensor,
    params: SamplingParams,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    end_tokens: Collection[int],
) -> None:
    """In place and in this order: end tokens masked before min_tokens, bias, penalties.

    As in vLLM, repetition (Keskar et al. 2019, section 4.1: divide what is positive, multiply what
    is not) concerns tokens of prompt and output, presence and frequency those of the output.
    """
    if len(output) < params.min_tokens and end_tokens:
        logits_V[torch.tensor(sorted(end_tokens))] = float("-inf")
    if params.logit_bias:
        biased = torch.tensor(list(params.logit_bias))
        logits_V[biased] += torch.tensor(list(params.logit_bias.values()))
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *output}))
        x = logits_V[seen]
        penalty = params.repetition_penalty
        logits_V[seen] = torch.where(x > 0, x / penalty, x * penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(output)
        seen = torch.tensor(list(counts))
        logits_V[seen] -= params.presence_penalty
        logits_V[seen] -= params.frequency_penalty * torch.tensor(list(counts.values())).float()
