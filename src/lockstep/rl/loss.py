"""The clipped policy-gradient loss, and the proof that the first ratio is 1.

For each drawn token, with ratio = exp(logprob now - logprob at sampling) and advantage A:

    loss = weight * (-min(ratio A, clip(ratio, 1 - low, 1 + high) A) + beta KL)

Sources: PPO (Schulman et al. 2017, eq. 7), asymmetric clipping from DAPO (Yu et al. 2025), KL
estimators from Schulman, "Approximating KL Divergence" (2020). The weights carry the aggregation
(see `batch`). The logprobs at sampling come from the engine: there is no second forward for them,
and as trainer and engine compute the same bits, the ratio of an unchanged policy is exactly 1.

Shapes: R tokens that carry loss.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lockstep.core.errors import LockstepError
from lockstep.models.llama import Llama
from lockstep.rl.config import AlgorithmConfig
from lockstep.train.packing import MicroBatch
from lockstep.train.step import LossSum, target_statistics

ADVANTAGE, BEHAVIOUR, NUM_COPIES = "advantage", "behaviour_logprob", "num_copies"
"""Columns of a micro-batch; a token stands for `num_copies` equal ones."""

Reference = Callable[[], AbstractContextManager[Llama]]
"""Gives the model whose distribution KL is measured from, for the time of a `with` block."""


class MismatchError(LockstepError, ArithmeticError):
    """Trainer and engine gave different logprobs for the same tokens under the same weights."""


class PolicyLoss:
    """A `train.step.LossFn` that also keeps the extremes a sum cannot hold, for one update."""

    def __init__(
        self,
        config: AlgorithmConfig,
        *,
        inverse_temperature: float,
        is_on_policy: bool,
        reference: Reference | None = None,
    ) -> None:
        self._config = config
        self._inverse_temperature = inverse_temperature
        self._is_on_policy = is_on_policy
        self._reference = reference
        self.min_ratio, self.max_ratio = float("inf"), 0.0
        self.max_logprob_difference = 0.0
        self.num_mismatches = 0
        """Tokens of an on-policy update whose logprob is not bitwise the engine's."""

    def __call__(self, model: Llama, micro_batch: MicroBatch) -> LossSum:
        config = self._config
        advantage_R = micro_batch.columns[ADVANTAGE]
        statistics = target_statistics(
            model, micro_batch, inverse_temperature=self._inverse_temperature
        )
        difference_R = statistics.logprobs_T - micro_batch.columns[BEHAVIOUR]
        ratio_R = difference_R.exp()
        self._observe(difference_R.detach(), ratio_R.detach())
        low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
        surrogate_R = torch.minimum(ratio_R * advantage_R, ratio_R.clamp(low, high) * advantage_R)
        loss_R = -surrogate_R
        reported = {
            "entropy": statistics.entropy_T,
            "ratio": ratio_R.detach(),
            "logprob_difference": difference_R.detach().abs(),
            "clipped_low": (ratio_R < low) & (advantage_R < 0),
            "clipped_high": (ratio_R > high) & (advantage_R > 0),
        }
        if self._reference is not None:
            kl_R = kl_estimate(
                statistics.logprobs_T,
                self._reference_logprobs(micro_batch),
                estimator=config.kl_estimator,
            )
            loss_R = loss_R + config.kl_beta * kl_R
            reported["kl"] = kl_R.detach()
        copies_R = micro_batch.columns[NUM_COPIES]
        sums = {name: (values_R * copies_R).sum() for name, values_R in reported.items()}
        return LossSum(
            total=(loss_R * micro_batch.weights_R).sum(), sums=sums | {"tokens": copies_R.sum()}
        )

    @torch.no_grad()
    def _reference_logprobs(self, micro_batch: MicroBatch) -> Tensor:
        assert self._reference is not None
        with self._reference() as model:
            return target_statistics(
                model, micro_batch, inverse_temperature=self._inverse_temperature
            ).logprobs_T

    def _observe(self, difference_R: Tensor, ratio_R: Tensor) -> None:
        if ratio_R.numel() == 0:
            return
        self.min_ratio = min(self.min_ratio, ratio_R.min().item())
        self.max_ratio = max(self.max_ratio, ratio_R.max().item())
        largest = difference_R.abs().max().item()
        self.max_logprob_difference = max(self.max_logprob_difference, largest)
        if not self._is_on_policy:
            return
        wrong = int((difference_R != 0).sum())
        self.num_mismatches += wrong
        if wrong and self._config.on_mismatch == "fail":
            raise MismatchError(
                f"trainer and engine disagree on {wrong} of {ratio_R.numel()} tokens of one "
                f"micro-batch under the same weights, by up to {largest:g} in logprob; the first "
                "ratio must be exactly 1. `lockstep info kernels` shows which kernels run; "
                "on_mismatch=warn continues regardless"
            )

    @property
    def max_ratio_deviation(self) -> float:
        """Largest |ratio - 1|; 0 if no token carried loss."""
        if self.max_ratio == 0.0:
            return 0.0
        return max(self.max_ratio - 1.0, 1.0 - self.min_ratio)


def kl_estimate(logprobs_R: Tensor, reference_R: Tensor, *, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens that the policy drew."""
    log_ratio_R = reference_R - logprobs_R
    if estimator == "k1":
        return -log_ratio_R
    if estimator == "k2":
        return log_ratio_R.square() / 2
    assert estimator == "k3", f"unknown KL estimator {estimator}"
    return log_ratio_R.exp() - 1 - log_ratio_R
