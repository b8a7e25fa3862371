"""Logprobs of the prompt's own tokens, gathered as its chunks are computed.

Position p of the hidden states tells of token p + 1, so a chunk describes the tokens one place to
its right. Legend: T packed tokens, D hidden, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lockstep.core.records import TokenLogprob
from lockstep.engine.runner import ModelRunner
from lockstep.engine.sampler import describe_tokens
from lockstep.schedule import Chunk


class PromptLogprobs:
    """One request's, some of them not known yet."""

    def __init__(self, prompt: Sequence[int], *, start: int, num_top: int) -> None:
        self.entries: list[TokenLogprob | None] = [None] * len(prompt)
        self.num_top = num_top
        self._prompt = prompt
        self._start = max(start, 1)

    @property
    def max_cached_tokens(self) -> int:
        """Leading tokens whose hidden states are not needed."""
        return self._start - 1

    def targets(self, chunk: Chunk) -> range:
        """Prompt positions that this chunk describes for the first time."""
        first = max(chunk.start + 1, self._start)
        positions = range(first, max(first, min(chunk.end + 1, len(self._prompt))))
        is_known = bool(positions) and self.entries[positions[-1]] is not None
        return range(0) if is_known else positions

    def tokens(self, positions: range) -> Sequence[int]:
        return self._prompt[positions.start : positions.stop]


def describe_prompts(
    runner: ModelRunner, hidden_TD: Tensor, chunks: Sequence[tuple[PromptLogprobs, Chunk, int]]
) -> None:
    """Fill in what these chunks tell; each comes with its offset in `hidden_TD`.

    Where alternatives are not asked for, the fused kernel gives the logprobs of all prompts in one
    go and logits never exist whole.
    """
    plain = [(prompt, chunk, offset) for prompt, chunk, offset in chunks if prompt.num_top == 0]
    if plain:
        rows, tokens = zip(*(_rows(*entry) for entry in plain), strict=True)
        targets_R = torch.cat(tokens)
        logprobs = runner.token_logprobs(hidden_TD[torch.cat(rows)], targets_R)
        described = (
            TokenLogprob(token_id=token, logprob=logprob)
            for token, logprob in zip(targets_R.tolist(), logprobs.tolist(), strict=True)
        )
        for prompt, chunk, _ in plain:
            _fill(prompt, chunk, described)
    for prompt, chunk, offset in chunks:
        if prompt.num_top > 0:
            rows_R, targets_R = _rows(prompt, chunk, offset)
            _fill(prompt, chunk, _with_alternatives(runner, hidden_TD[rows_R], targets_R, prompt))


def _rows(prompt: PromptLogprobs, chunk: Chunk, offset: int) -> tuple[Tensor, Tensor]:
    """Rows of the packed hidden states that describe the chunk's targets, and those targets."""
    positions = prompt.targets(chunk)
    shift = offset - chunk.start - 1
    rows_R = torch.arange(positions.start + shift, positions.stop + shift)
    return rows_R, torch.tensor(prompt.tokens(positions), dtype=torch.int64)


def _with_alternatives(
    runner: ModelRunner, hidden_RD: Tensor, targets_R: Tensor, prompt: PromptLogprobs
) -> Iterator[TokenLogprob]:
    start = 0
    for logits_RV in runner.logits(hidden_RD):
        end = start + len(logits_RV)
        yield from describe_tokens(logits_RV, targets_R[start:end], num_top=prompt.num_top)
        start = end


def _fill(prompt: PromptLogprobs, chunk: Chunk, described: Iterator[TokenLogprob]) -> None:
    for position in prompt.targets(chunk):
        prompt.entries[position] = next(described)
