"""Logprobs of given tokens: the loss of training and the report of serving, from the same bits.

`token_logprobs` goes from hidden states through the last projection (fused and chunked, for
training and prompt logprobs); `logprobs_of` starts from logits the sampler already has. Both give
the same bits for the same row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import dispatch
from lockstep.kernels.cross_entropy import cpu, reference
from lockstep.kernels.linear import PackCache

__all__ = ["TokenStatistics", "logprobs_of", "token_statistics"]


@dataclass(frozen=True)
class TokenStatistics:
    """Of each row: the target's logprob (differentiable) and the distribution's entropy in nats
    (not).
    """

    logprobs_T: Tensor
    entropy_T: Tensor


def _fake_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(rows.new_empty(rows.shape[0], dtype=torch.float32) for _ in range(3))


_token_logprobs = dispatch.define(
    "token_logprobs(Tensor hidden, Tensor weight, Tensor packed, Tensor targets,"
    " Tensor inverse_temperature)"
    " -> (Tensor, Tensor, Tensor)",
    reference=reference.token_logprobs,
    native=cpu.token_logprobs,
    fake=lambda hidden, weight, packed, targets, inverse_temperature: _fake_rows(hidden),
)
_backward_op = dispatch.define(
    "token_logprobs_backward(Tensor dlogprobs, Tensor hidden, Tensor weight, Tensor packed,"
    " Tensor targets,"
    " Tensor inverse_temperature, Tensor lse, bool weight_needs_grad) -> (Tensor, Tensor)",
    reference=reference.token_logprobs_backward,
    native=cpu.token_logprobs_backward,
    fake=lambda d, hidden, weight, packed, targets, scale, lse, needs: (
        hidden.new_empty(hidden.shape),
        hidden.new_empty(weight.shape if needs else 0, dtype=torch.float32),
    ),
)
_row_logprobs = dispatch.define(
    "row_logprobs(Tensor logits, Tensor targets, Tensor inverse_temperature)"
    " -> (Tensor, Tensor, Tensor)",
    reference=reference.row_logprobs,
    native=cpu.row_logprobs,
    fake=lambda logits, targets, inverse_temperature: _fake_rows(logits),
)


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    _logprobs, lse, entropy = output
    ctx.mark_non_differentiable(lse, entropy)
    ctx.save_for_backward(*inputs, lse)


def _backward(
    ctx: Any, dlogprobs: Tensor, _dlse: Tensor, _dentropy: Tensor
) -> tuple[Tensor | None, ...]:
    hidden, weight, *rest = ctx.saved_tensors
    needs_weight = ctx.needs_input_grad[1]
    dhidden, dweight = _backward_op(dlogprobs.contiguous(), hidden, weight, *rest, needs_weight)
    return dhidden, dweight.to(weight.dtype) if needs_weight else None, None, None, None


dispatch.autograd("token_logprobs", backward=_backward, setup_context=_setup_context)


def token_statistics(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    packs: PackCache,
    inverse_temperature: float | Tensor = 1.0,
) -> TokenStatistics:
    """Logprob and entropy of each row's next-token distribution; targets are int64 in [0, V)."""
    packed = packs.get(weight_VD, hidden_TD.dtype)
    scale_T = _expand(inverse_temperature, targets_T)
    logprobs, _lse, entropy = _token_logprobs(hidden_TD, weight_VD, packed, targets_T, scale_T)
    return TokenStatistics(logprobs, entropy)


def logprobs_of(
    logits_TV: Tensor, targets_T: Tensor, inverse_temperature: float | Tensor = 1.0
) -> Tensor:
    """Logprob of each row's target from fp32 logits; no gradient."""
    return _row_logprobs(logits_TV, targets_T, _expand(inverse_temperature, targets_T))[0]


def _expand(value: float | Tensor, like_T: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(torch.float32).contiguous()
    return torch.full(like_T.shape, value, dtype=torch.float32, device=like_T.device)
