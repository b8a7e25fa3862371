"""One optimizer step from a list of micro-batches, for any loss that is a sum over tokens.

The gradient is that of `sum over micro-batches of loss_fn(model, micro_batch).total /
normaliser`. The normaliser is known before the first forward (for a token mean, the number of
loss tokens in the *global* batch), so gradient accumulation equals the big batch: no mean of
means.

Shapes: T packed tokens, D hidden, R tokens that carry loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.core.errors import LockstepError
from lockstep.kernels import huge_pages
from lockstep.kernels.cross_entropy import TokenStatistics
from lockstep.kernels.embedding import embedding
from lockstep.kernels.gradients import accumulated_in_place
from lockstep.models.llama import Llama
from lockstep.train.optimizer import (
    AdamW,
    clipping_factor,
    gradient_norm,
    trainable_parameters,
)
from lockstep.train.packing import MicroBatch


class DivergenceError(LockstepError, ArithmeticError):
    """The loss or its gradient is no longer a finite number; the weights were left as they were."""


@dataclass(frozen=True, kw_only=True)
class LossSum:
    """What a loss function returns for one micro-batch: sums, which add up over micro-batches."""

    total: Tensor
    """Scalar to differentiate: a weighted sum over tokens, not a mean."""
    sums: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Further quantities to report, added up over the step."""


LossFn = Callable[[Llama, MicroBatch], LossSum]


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What one optimizer step did."""

    loss: float
    """Sum of the totals over the normaliser."""
    grad_norm: float
    """Global L2 norm before clipping."""
    num_tokens: int
    num_loss_tokens: int
    sums: Mapping[str, float]


def target_statistics(
    model: Llama, micro_batch: MicroBatch, *, inverse_temperature: float = 1.0
) -> TokenStatistics:
    """Logprob of each loss token given what precedes it in its document, and the entropy there.

    R values each, fp32; only the logprobs are differentiable. Only the R rows that carry loss
    meet the vocabulary projection; a row's bits do not depend on the others.
    """
    hidden_RD = _predicting_rows(model, micro_batch)
    return model.token_statistics(hidden_RD, micro_batch.targets_R, inverse_temperature)


def negative_log_likelihood(model: Llama, micro_batch: MicroBatch) -> LossSum:
    """Cross-entropy summed over the loss tokens: the loss of supervised fine-tuning."""
    hidden_RD = _predicting_rows(model, micro_batch)
    weighted = model.weighted_logprob_sum(hidden_RD, micro_batch.targets_R, micro_batch.weights_R)
    return LossSum(total=-weighted.total, sums={"entropy": weighted.entropy_T.sum()})


def _predicting_rows(model: Llama, micro_batch: MicroBatch) -> Tensor:
    """Hidden states (R, D) of the rows that predict a loss token."""
    attention = micro_batch.attention(kv_format=model.kv_format)
    hidden_TD = model(micro_batch.tokens_T, micro_batch.positions_T, attention)
    return embedding(hidden_TD, micro_batch.rows_R, dtype=hidden_TD.dtype)  # gathers rows


def train_step(
    model: Llama,
    optimizer: AdamW,
    micro_batches: Sequence[MicroBatch],
    loss_fn: LossFn,
    *,
    normaliser: float,
    max_grad_norm: float | None = 1.0,
) -> StepMetrics:
    """Accumulate, clip, step; DivergenceError (weights untouched) if a value is not finite."""
    optimizer.zero_grad(set_to_none=True)
    if model.recomputes_mlp:  # memory is short: activations do not fit where gradients were
        huge_pages.trim_heap()
    loss_sum = 0.0
    sums: dict[str, float] = {}
    for micro_batch in micro_batches:
        loss = loss_fn(model, micro_batch)
        with accumulated_in_place():
            torch.autograd.backward(loss.total / normaliser)
        loss_sum += loss.total.item()
        for name, value in loss.sums.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    grad_norm = gradient_norm(trainable_parameters(model))
    if not (abs(grad_norm) < float("inf") and abs(loss_sum) < float("inf")):
        raise DivergenceError(
            f"the loss is {loss_sum / normaliser:g} and the gradient norm {grad_norm:g}; lower the "
            f"learning rate (now {optimizer.param_groups[0]['lr']:g}) or look for damaged records"
        )
    optimizer.step(grad_scale=clipping_factor(grad_norm, max_norm=max_grad_norm))
    return StepMetrics(
        loss=loss_sum / normaliser,
        grad_norm=grad_norm,
        num_tokens=sum(batch.num_tokens for batch in micro_batches),
        num_loss_tokens=sum(batch.num_loss_tokens for batch in micro_batches),
        sums=sums,
    )


@torch.no_grad()
def evaluate_loss(model: Llama, micro_batches: Iterable[MicroBatch], loss_fn: LossFn) -> float:
    """Weighted mean of the loss over all tokens of `micro_batches`, without touching gradients."""
    total = weight = 0.0
    for micro_batch in micro_batches:
        total += loss_fn(model, micro_batch).total.item()
        weight += micro_batch.weights_R.sum(dtype=torch.float64).item()
    return total / weight
