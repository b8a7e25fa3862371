"""Draw one token a row with noise that depends only on (seed, position, token id): the
specification.

Gumbel-max (Gumbel 1954; Maddison et al. 2014): token = argmax over kept v of x[v] + g[v], x =
logits / temperature, g = -log(-log u). u comes from Philox4x32-10 (Salmon et al. 2011) with key =
seed and counter = (v div 4, position low, position high, 0), word v mod 4, top 23 bits: u = (word
>> 9 + 1/2) 2^-23. The logprob is that of the kept tokens' distribution. Filters act in the order
top-k, top-p, min-p; ties keep the lower id. Temperature 0 takes the largest logit, lowest id first,
with logprob 0. From a row that holds NaN, or whose largest logit is infinite, nothing can be drawn:
token 0 with logprob NaN. S rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def philox(seed: int, position: int, num_tokens: int) -> Tensor:
    """The noise words for tokens 0 .. num_tokens, as int64 in [0, 2^32)."""
    counters = torch.arange(-(-num_tokens // 4), dtype=torch.int64)
    c = [
        counters,
        torch.full_like(counters, position & _MASK),
        torch.full_like(counters, (position >> 32) & _MASK),
        torch.zeros_like(counters),
    ]
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        product0, product1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        high0, high1 = (product0 >> 32) & _MASK, (product1 >> 32) & _MASK
        c = [high1 ^ c[1] ^ key0, product1 & _MASK, high0 ^ c[3] ^ key1, product0 & _MASK]
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    return torch.stack(c, dim=1).flatten()[:num_tokens]


def gumbel(seed: int, position: int, num_tokens: int) -> Tensor:
    uniform = ((philox(seed, position, num_tokens) >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def kept_mask(x_V: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which tokens may be drawn, given scaled logits."""
    kept = torch.ones_like(x_V, dtype=torch.bool)
    order = torch.sort(x_V, descending=True, stable=True).indices
    if 0 < top_k < len(x_V):
        kept[order[top_k:]] = False
    if top_p < 1.0:
        probabilities = x_V.double().masked_fill(~kept, float("-inf")).softmax(0)[order]
        kept[order[(probabilities.cumsum(0) - probabilities) >= top_p]] = False
    if min_p > 0.0:
        kept &= x_V >= x_V.max() + torch.log(torch.tensor(min_p))
    return kept


def sample(
    logits_SV: Tensor,
    temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    min_p_S: Tensor,
    seed_S: Tensor,
    position_S: Tensor,
) -> tuple[Tensor, Tensor]:
    tokens, logprobs = [], []
    for row, logits in enumerate(logits_SV):
        temperature = float(temperature_S[row])
        if not logits.max().isfinite():  # max propagates NaN
            tokens.append(0)
            logprobs.append(float("nan"))
            continue
        if temperature == 0.0:
            tokens.append(int((logits == logits.max()).nonzero()[0]))
            logprobs.append(0.0)
            continue
        x = logits.float() * (1.0 / temperature_S[row])
        kept = kept_mask(x, int(top_k_S[row]), float(top_p_S[row]), float(min_p_S[row]))
        x = x.masked_fill(~kept, float("-inf"))
        noisy = x + gumbel(int(seed_S[row]), int(position_S[row]), len(x))
        token = int((noisy == noisy.max()).nonzero()[0])
        tokens.append(token)
        logprobs.append(float(x[token] - torch.logsumexp(x, 0)))
    return torch.tensor(tokens, dtype=torch.int64), torch.tensor(logprobs, dtype=torch.float32)
