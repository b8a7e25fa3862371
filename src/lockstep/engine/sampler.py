"""From logits to drawn tokens and their logprobs. The order is fixed:

1. the raw logprob is read off the raw logits, with the bits `model.token_logprobs` gives a trainer;
2. end tokens are masked before min_tokens, then logit bias, then repetition, presence and frequency
   penalties (`lockstep.engine.logits`);
3. temperature, top-k, top-p, min-p and the draw (`lockstep.kernels.sampling`), whose noise is
   keyed by (seed, position of the drawn token), so that nothing else can change it.

A request that asks for nothing of 2. and no alternatives is drawn within the step (see
`lockstep.engine.runner`), by the same kernels; only the others come here.

With a temperature and nothing else the sampling logprob has the bits of `model.token_logprobs(...,
inverse_temperature=params.inverse_temperature)`. A row's result never depends on the other rows.
Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.core.records import TokenLogprob
from lockstep.core.sampling import SamplingParams
from lockstep.engine.logits import adjust, changes_logits
from lockstep.engine.runner import StepOutputs
from lockstep.engine.step_inputs import RowSampling
from lockstep.kernels.cross_entropy import logprobs_of
from lockstep.kernels.sampling import SampleResult, sample

_SIGNED = 1 << 64
_HALF = 1 << 63


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """How one row of logits becomes a token."""

    params: SamplingParams
    seed: int
    prompt: Sequence[int]
    output: Sequence[int]
    """What was drawn so far."""
    end_tokens: Collection[int]
    """Tokens that would end the sample, so that they are masked before min_tokens."""

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def row_sampling(params: SamplingParams, seed: int) -> RowSampling:
    """Step 3 as the kernel takes it."""
    return RowSampling(
        params.temperature, max(params.top_k, 0), params.top_p, params.min_p, _as_int64(seed)
    )


def wants_logits(params: SamplingParams) -> bool:
    """Whether every draw needs `draw_tokens`, whatever was drawn before."""
    return bool(params.logprobs) or changes_logits(params, num_output=params.min_tokens)


def drawn_tokens(outputs: StepOutputs) -> list[TokenLogprob]:
    """What a step drew by itself; a logprob is NaN where nothing could be drawn."""
    return [
        TokenLogprob(token_id=token, logprob=logprob, sampling_logprob=sampling_logprob)
        for group in outputs.groups
        for token, logprob, sampling_logprob in zip(
            group.token_ids_R.tolist(),
            group.logprobs_R.tolist(),
            group.sampling_logprobs_R.tolist(),
            strict=True,
        )
    ]


@torch.no_grad()
def draw_tokens(logits_RV: Tensor, draws: Sequence[Draw]) -> list[TokenLogprob]:
    """One token for each row, with everything its request wants to know about it."""
    result = _sample(_adjusted(logits_RV, draws), draws)
    tokens_R = result.token_ids_S
    logprobs = logprobs_of(logits_RV, tokens_R).tolist()
    alternatives = {
        row: (rank, top)
        for count in {draw.params.logprobs for draw in draws if draw.params.logprobs}
        for row, rank, top in _alternatives(logits_RV, tokens_R, _rows_with(draws, count), count)
    }
    drawn = []
    for row, (token, sampling_logprob) in enumerate(
        zip(tokens_R.tolist(), result.sampling_logprobs_S.tolist(), strict=True)
    ):
        rank, top = alternatives.get(row, (None, ()))
        drawn.append(
            TokenLogprob(
                token_id=token,
                logprob=logprobs[row],
                sampling_logprob=sampling_logprob,
                rank=rank,
                top=top,
            )
        )
    return drawn


@torch.no_grad()
def describe_tokens(logits_RV: Tensor, tokens_R: Tensor, *, num_top: int) -> list[TokenLogprob]:
    """Logprobs of given tokens, with rank and alternatives: prompt logprobs."""
    logprobs = logprobs_of(logits_RV, tokens_R).tolist()
    rows = torch.arange(len(tokens_R))
    return [
        TokenLogprob(token_id=int(tokens_R[row]), logprob=logprobs[row], rank=rank, top=top)
        for row, rank, top in _alternatives(logits_RV, tokens_R, rows, num_top)
    ]


def _adjusted(logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
    changed = [
        row
        for row, draw in enumerate(draws)
        if changes_logits(draw.params, num_output=len(draw.output))
    ]
    if not changed:
        return logits_RV
    adjusted_RV = logits_RV.clone()
    for row in changed:
        draw = draws[row]
        adjust(
            adjusted_RV[row],
            draw.params,
            prompt=draw.prompt,
            output=draw.output,
            end_tokens=draw.end_tokens,
        )
    return adjusted_RV


def _sample(logits_RV: Tensor, draws: Sequence[Draw]) -> SampleResult:
    rows = [row_sampling(draw.params, draw.seed) for draw in draws]
    return sample(
        logits_RV,
        temperature_S=torch.tensor([row.temperature for row in rows]),
        top_k_S=torch.tensor([row.top_k for row in rows]),
        top_p_S=torch.tensor([row.top_p for row in rows]),
        min_p_S=torch.tensor([row.min_p for row in rows]),
        seed_S=torch.tensor([row.seed for row in rows]),
        position_S=torch.tensor([draw.position for draw in draws]),
    )


def _rows_with(draws: Sequence[Draw], count: int) -> Tensor:
    return torch.tensor([row for row, draw in enumerate(draws) if draw.params.logprobs == count])


def _alternatives(
    logits_RV: Tensor, tokens_R: Tensor, rows: Tensor, count: int
) -> list[tuple[int, int, tuple[tuple[int, float], ...]]]:
    """(row, rank of its token, `count` most likely tokens with their logprobs), for each row."""
    x_RV = logits_RV[rows]
    chosen_R1 = x_RV.gather(1, tokens_R[rows, None])
    ranks = ((x_RV > chosen_R1).sum(1) + 1).tolist()
    top_RK = _top(x_RV, min(count, x_RV.shape[1]))
    logprobs_KR = [logprobs_of(x_RV, top_RK[:, k].contiguous()) for k in range(top_RK.shape[1])]
    logprobs_RK = torch.stack(logprobs_KR, dim=1)
    return [
        (row, rank, tuple(zip(ids, logprobs, strict=True)))
        for row, rank, ids, logprobs in zip(
            rows.tolist(), ranks, top_RK.tolist(), logprobs_RK.tolist(), strict=True
        )
    ]


def _top(x_RV: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest of each row, largest first, the lower id first among equals.

    `torch.topk` finds the smallest value that belongs; which of several equals it takes is not
    specified, so they are chosen here.
    """
    limits_R = x_RV.topk(count, dim=1).values[:, -1]
    rows = []
    for x_V, limit in zip(x_RV, limits_R, strict=True):
        ids = (x_V >= limit).nonzero()[:, 0]
        order = x_V[ids].sort(descending=True, stable=True).indices[:count]
        rows.append(ids[order])
    return torch.stack(rows)


def _as_int64(seed: int) -> int:
    """The same 64 bits, as torch holds them."""
    seed %= _SIGNED
    return seed - _SIGNED if seed >= _HALF else seed
