"""Logprobs of given tokens: the loss of training and the report of serving, from the same bits.

`token_logprobs` goes from hidden states through the last projection (fused and chunked, for
training and prompt logprobs); `logprobs_of` starts from logits the sampler already has. Both give
the same bits for the same row.

Where a gradient is wanted it is made in the forward pass, while the logits are at hand: d hidden is
linear in what each logprob's gradient will be, so it is kept for a factor of 1 and multiplied
later; d weight needs the factors beforehand, as `weighted_logprob_sum` has them. Only a trained
projection under factors that depend on the logprobs (RL on all weights) computes its logits twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.core.quantization import WeightScheme
from lockstep.kernels import dispatch, gradients
from lockstep.kernels.cross_entropy import cpu, reference
from lockstep.kernels.cross_entropy.quantized import QuantizedLogprobs
from lockstep.kernels.linear import PackCache, QuantizedWeight, Weight, runs_natively
from lockstep.kernels.linear.cpu import add_into
from lockstep.kernels.scale.cpu import scale_into

__all__ = [
    "TokenStatistics",
    "WeightedSum",
    "logprobs_of",
    "token_statistics",
    "weighted_logprob_sum",
]


@dataclass(frozen=True)
class TokenStatistics:
    """Of each row: the target's logprob (differentiable) and the distribution's entropy in nats
    (not).
    """

    logprobs_T: Tensor
    entropy_T: Tensor


@dataclass(frozen=True)
class WeightedSum:
    """sum weight logprob (a scalar, differentiable), and the entropy of each row (not)."""

    total: Tensor
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
_with_gradient = dispatch.define(
    "token_logprobs_with_gradient(Tensor hidden, Tensor weight, Tensor packed, Tensor targets,"
    " Tensor inverse_temperature, Tensor coefficients, bool weight_needs_grad)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=reference.token_logprobs_with_gradient,
    native=cpu.token_logprobs_with_gradient,
    fake=lambda hidden, weight, packed, targets, scale, coefficients, needs: (
        *_fake_rows(hidden),
        hidden.new_empty(hidden.shape, dtype=torch.float32),
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


class _Logprobs(torch.autograd.Function):
    """(logprobs, entropy) under a frozen projection; keeps d logprob / d hidden of each row."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, packed: Tensor, targets: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprobs, _lse, entropy, dhidden, _ = _with_gradient(
            hidden, weight, packed, targets, scale, torch.ones_like(scale), False
        )
        ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(dhidden)
        ctx.dtype = hidden.dtype
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, dlogprobs: Tensor, _dentropy: Tensor) -> tuple[Tensor | None, ...]:
        (dhidden,) = ctx.saved_tensors
        return (dhidden * dlogprobs[:, None]).to(ctx.dtype), None, None, None, None


class _WeightedSum(torch.autograd.Function):
    """(sum, entropy); keeps the sum's gradients, that of the weight for one backward pass only."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        packed: Tensor,
        targets: Tensor,
        scale: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        needs_weight = ctx.needs_input_grad[1]
        logprobs, _lse, entropy, dhidden, dweight = _with_gradient(
            hidden, weight, packed, targets, scale, weights, needs_weight
        )
        ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(dhidden)
        ctx.dtype, ctx.weight = hidden.dtype, weight
        ctx.dweight = dweight if needs_weight else None
        return (logprobs * weights).sum(), entropy

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor, _dentropy: Tensor) -> tuple[Tensor | None, ...]:
        (dhidden,) = ctx.saved_tensors
        dweight = None
        if ctx.needs_input_grad[1]:
            # Scaled in place: a second copy of a vocabulary's gradient would be the peak of memory.
            assert ctx.dweight is not None, "the weight's gradient was used up by another backward"
            made, ctx.dweight = ctx.dweight, None
            native = runs_natively(made)
            if native:
                scale_into(made, made, dtotal.item())
            else:
                made.mul_(dtotal)
            dweight = gradients.deliver(
                ctx.weight,
                lambda: made,
                lambda grad: add_into(grad, made) if native else grad.add_(made),
            )
        return (dhidden * dtotal).to(ctx.dtype), dweight, None, None, None, None


def token_statistics(
    hidden_TD: Tensor,
    weight_VD: Weight,
    targets_T: Tensor,
    *,
    packs: PackCache,
    inverse_temperature: float | Tensor = 1.0,
    scheme: WeightScheme | None = None,
) -> TokenStatistics:
    """Logprob and entropy of each row's next-token distribution; targets are int64 in [0, V).

    `scheme` is how a float weight is rounded on the fly.
    """
    scale_T = _expand(inverse_temperature, targets_T)
    if scheme is not None or isinstance(weight_VD, QuantizedWeight):
        master_VD = None if isinstance(weight_VD, QuantizedWeight) else weight_VD
        logprobs, _lse, entropy = QuantizedLogprobs.apply(
            hidden_TD, master_VD, weight_VD, packs, scheme, targets_T, scale_T, _row_logprobs
        )
        return TokenStatistics(logprobs, entropy)
    packed = packs.get([weight_VD], hidden_TD.dtype).data
    inputs = (hidden_TD, weight_VD, packed, targets_T, scale_T)
    if torch.is_grad_enabled() and hidden_TD.requires_grad and not weight_VD.requires_grad:
        return TokenStatistics(*_Logprobs.apply(*inputs))
    logprobs, _lse, entropy = _token_logprobs(*inputs)
    return TokenStatistics(logprobs, entropy)


def weighted_logprob_sum(
    hidden_TD: Tensor,
    weight_VD: Weight,
    targets_T: Tensor,
    weights_T: Tensor,
    *,
    packs: PackCache,
    inverse_temperature: float | Tensor = 1.0,
    scheme: WeightScheme | None = None,
) -> WeightedSum:
    """sum of weights (fp32, constants) times the logprobs of `token_statistics`, to the bit."""
    is_quantized = scheme is not None or isinstance(weight_VD, QuantizedWeight)
    if is_quantized or not torch.is_grad_enabled():
        statistics = token_statistics(
            hidden_TD,
            weight_VD,
            targets_T,
            packs=packs,
            inverse_temperature=inverse_temperature,
            scheme=scheme,
        )
        total = (statistics.logprobs_T * weights_T).sum()
        return WeightedSum(total, statistics.entropy_T)
    packed = packs.get([weight_VD], hidden_TD.dtype).data
    scale_T = _expand(inverse_temperature, targets_T)
    return WeightedSum(
        *_WeightedSum.apply(
            hidden_TD, weight_VD, packed, targets_T, scale_T, weights_T.contiguous()
        )
    )


def logprobs_of(
    logits_TV: Tensor, targets_T: Tensor, inverse_temperature: float | Tensor = 1.0
) -> Tensor:
    """Logprob of each row's target from fp32 logits; no gradient."""
    return _row_logprobs(logits_TV, targets_T, _expand(inverse_temperature, targets_T))[0]


def _expand(value: float | Tensor, like_T: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(torch.float32).contiguous()
    return torch.full(like_T.shape, value, dtype=torch.float32, device=like_T.device)
