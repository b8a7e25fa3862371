"""How far a compressed model strayed: the measurement that decides whether it may be used.

Both models read the same held-out text, layer by layer. Of each token's next-token distributions p
(original, bf16) and q (quantised) it takes KL(p || q), whether the likeliest token is the same, and
the log-likelihood of the token that follows. Past a limit the gate fails, in one sentence with the
numbers. Legend: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.compress.config import Limits

Logits = Callable[[Tensor], Tensor]
"""Hidden states (T, D) after the last norm to fp32 logits (T, V)."""

_ROWS_AT_ONCE = 128
"""Rows whose logits are in memory at a time, twice."""


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """What one layer adds up to."""

    layer: int
    output_error: float
    """Of the hidden states behind this layer, all layers so far quantised: root mean square of the
    difference over that of the original."""
    projections: dict[str, float]
    """Error each projection's rounding makes in its own output, on the calibration text."""


@dataclass(frozen=True, kw_only=True)
class GateReport:
    """The gate's figures and its verdict."""

    text: str
    """Which held-out text."""
    num_tokens: int
    """Tokens predicted."""
    perplexity_before: float
    perplexity_after: float
    increase_error: float
    """Standard error of `perplexity_increase`, from how tokens differ: more text, less of it."""
    kl_mean: float
    """Nats a token."""
    kl_p99: float
    agreement: float
    max_perplexity_increase: float
    limits: Limits
    layers: list[LayerError] = field(default_factory=list)

    @property
    def perplexity_increase(self) -> float:
        return self.perplexity_after / self.perplexity_before - 1

    @property
    def failures(self) -> list[str]:
        """What is past its limit, each with its numbers; empty where the gate is passed."""
        found = []
        # Written so that NaN fails.
        if not self.perplexity_increase <= self.max_perplexity_increase:
            found.append(
                f"perplexity rose by {self.perplexity_increase:.2%} "
                f"(from {self.perplexity_before:.3f} to {self.perplexity_after:.3f}), "
                f"at most {self.max_perplexity_increase:.2%} is allowed"
            )
        limits = self.limits
        if limits.max_kl is not None and not self.kl_mean <= limits.max_kl:
            found.append(f"KL is {self.kl_mean:.4f} nats a token, allowed {limits.max_kl:g}")
        if limits.min_agreement is not None and not self.agreement >= limits.min_agreement:
            found.append(
                f"the likeliest token is the same for {self.agreement:.1%}, "
                f"required {limits.min_agreement:.1%}"
            )
        return found


class Divergence:
    """Gathers, sequence by sequence, how two models' predictions differ."""

    def __init__(self) -> None:
        self._kl: list[Tensor] = []
        self._same: list[Tensor] = []
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []

    def add(
        self,
        original_TD: Tensor,
        quantized_TD: Tensor,
        tokens_T: Tensor,
        *,
        logits_before: Logits,
        logits_after: Logits,
    ) -> None:
        """Hidden states of one sequence after the last norm, and its tokens."""
        targets_T = tokens_T[1:]
        for start in range(0, len(targets_T), _ROWS_AT_ONCE):
            rows = slice(start, min(start + _ROWS_AT_ONCE, len(targets_T)))
            p = F.log_softmax(logits_before(original_TD[rows].clone()), -1)
            q = F.log_softmax(logits_after(quantized_TD[rows].clone()), -1)
            at = targets_T[rows, None]
            self._kl.append((p.exp() * (p - q)).sum(-1))
            self._same.append((p.argmax(-1) == q.argmax(-1)).float())
            self._before.append(p.gather(1, at)[:, 0])
            self._after.append(q.gather(1, at)[:, 0])

    def report(
        self,
        *,
        text: str,
        max_perplexity_increase: float,
        limits: Limits,
        layers: Sequence[LayerError],
    ) -> GateReport:
        kl = torch.cat(self._kl)
        return GateReport(
            text=text,
            num_tokens=len(kl),
            perplexity_before=_perplexity(self._before),
            perplexity_after=_perplexity(self._after),
            increase_error=_standard_error(torch.cat(self._before) - torch.cat(self._after)),
            kl_mean=float(kl.mean()),
            kl_p99=_percentile(kl, 0.99),
            agreement=float(torch.cat(self._same).mean()),
            max_perplexity_increase=max_perplexity_increase,
            limits=limits,
            layers=list(layers),
        )


def _perplexity(logprobs: Sequence[Tensor]) -> float:
    mean = float(torch.cat(list(logprobs)).double().mean())
    return math.exp(-mean) if mean > -700 else math.inf


def _standard_error(x: Tensor) -> float:
    return float(x.double().std(correction=0)) / math.sqrt(len(x))


def _percentile(x: Tensor, share: float) -> float:
    """torch's quantile takes at most 2^24 values."""
    return float(x.sort().values[min(len(x) - 1, round(share * (len(x) - 1)))])
