"""Logprob of one target a row, from hidden states or from logits: the specification.

x = logits / temperature, logprob = x[target] - logsumexp(x), entropy = -sum p log p; in fp32. T
rows, D features, V vocabulary. The sum of exponentials runs over 8 fixed segments of the vocabulary
joined by a fixed tree. Gradient: d x[v] = (1[v = target] - p[v]) / temperature d logprob.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    packed: Tensor,
    targets_T: Tensor,
    inverse_temperature_T: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = hidden_TD.float() @ weight_VD.to(hidden_TD.dtype).float().t()
    return row_logprobs(logits, targets_T, inverse_temperature_T)


def row_logprobs(
    logits_TV: Tensor, targets_T: Tensor, inverse_temperature_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs, logsumexp of the scaled logits, entropy), each (T,) fp32."""
    x = logits_TV.float() * inverse_temperature_T[:, None]
    lse = torch.logsumexp(x, -1)
    logprobs = x.gather(1, targets_T[:, None])[:, 0] - lse
    probabilities = torch.exp(x - lse[:, None])
    return logprobs, lse, lse - (probabilities * x).nan_to_num(0.0).sum(-1)


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
    """dhidden in hidden's dtype; dweight in fp32, empty when not needed."""
    weight = weight_VD.to(hidden_TD.dtype).float()
    x = (hidden_TD.float() @ weight.t()) * inverse_temperature_T[:, None]
    dlogits = -torch.exp(x - lse_T[:, None])
    dlogits[torch.arange(len(targets_T)), targets_T] += 1.0
    dlogits = (dlogits * (inverse_temperature_T * dlogprobs_T)[:, None]).to(hidden_TD.dtype).float()
    dweight = dlogits.t() @ hidden_TD.float() if weight_needs_grad else torch.empty(0)
    return (dlogits @ weight).to(hidden_TD.dtype), dweight


def token_logprobs_with_gradient(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    packed: Tensor,
    targets_T: Tensor,
    inverse_temperature_T: Tensor,
    coefficients_T: Tensor,
    weight_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`token_logprobs`, then dhidden and dweight of sum coefficient logprob; both in fp32."""
    inputs = (hidden_TD, weight_VD, packed, targets_T, inverse_temperature_T)
    statistics = token_logprobs(*inputs)
    gradients = token_logprobs_backward(coefficients_T, *inputs, statistics[1], weight_needs_grad)
    return *statistics, gradients[0].float(), gradients[1]
