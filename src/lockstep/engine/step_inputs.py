"""What a step computes on, in tensors that stay where they are.

A captured step reads its inputs from fixed addresses, so they are made once, for the largest step
there can be, and written in place; a step uses their first rows. Legend: T packed tokens,
S sequences, B blocks a sequence, R rows that are drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lockstep.schedule import Step


class RowSampling(NamedTuple):
    """How one row of logits becomes a token, in the units of `lockstep.kernels.sampling`."""

    temperature: float
    top_k: int
    """0 keeps all."""
    top_p: float
    min_p: float
    seed: int
    """As int64."""


class StepShape(NamedTuple):
    """What the list of kernel calls of a step depends on, besides the model."""

    num_tokens: int
    num_seqs: int
    num_rows: int
    draws_all: bool
    """Every token is a sequence's only one and drawn from, as in decoding."""
    keeps_logits: bool
    """The rows' logits are wanted whole, after the step."""
    keeps_hidden: bool
    """The hidden states of all tokens are wanted, not only of rows that are drawn from."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """What may vary while the kernels called stay the same."""
        if self.draws_all:
            return (self.num_tokens,)
        return self.num_tokens, self.num_seqs, self.num_rows

    def with_sizes(self, *sizes: int) -> StepShape:
        tokens, seqs, rows = sizes * 3 if self.draws_all else sizes
        return self._replace(num_tokens=tokens, num_seqs=seqs, num_rows=rows)


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """The largest step there can be."""

    max_tokens: int
    max_seqs: int
    max_blocks: int
    """Of one sequence."""


class StepInputs:
    """The tensors, and how a step is written into them."""

    def __init__(self, limits: StepLimits) -> None:
        t, s, b = limits.max_tokens, limits.max_seqs, limits.max_blocks
        self.tokens_T = torch.zeros(t, dtype=torch.int64)
        self.positions_T = torch.zeros(t, dtype=torch.int64)
        self.block_tables_SB = torch.zeros(s, b, dtype=torch.int32)
        self.query_starts_S1 = torch.zeros(s + 1, dtype=torch.int32)
        self.context_lens_S = torch.zeros(s, dtype=torch.int32)
        self.rows_R = torch.zeros(s, dtype=torch.int64)
        """Which of the packed tokens are drawn from."""
        self.draw_positions_R = torch.zeros(s, dtype=torch.int64)
        self.temperature_R = torch.zeros(s)
        self.top_k_R = torch.zeros(s, dtype=torch.int64)
        self.top_p_R = torch.ones(s)
        self.min_p_R = torch.zeros(s)
        self.seed_R = torch.zeros(s, dtype=torch.int64)
        self.one_R = torch.ones(s)

        self._tokens = self.tokens_T.numpy()
        self._positions = self.positions_T.numpy()
        self._tables = memoryview(self.block_tables_SB.numpy().reshape(-1))  # type: ignore[arg-type]
        self._starts = self.query_starts_S1.numpy()
        self._contexts = self.context_lens_S.numpy()
        self._rows = self.rows_R.numpy()
        self._draw_positions = self.draw_positions_R.numpy()
        self._sampling = tuple(
            tensor.numpy()
            for tensor in (
                self.temperature_R,
                self.top_k_R,
                self.top_p_R,
                self.min_p_R,
                self.seed_R,
            )
        )
        self.last_end = 0
        """One more than the greatest position of the step."""
        self._written: list[RowSampling] = []
        self._width = b

    def write(
        self,
        step: Step,
        sampling: Sequence[RowSampling],
        *,
        keeps_logits: bool = False,
        keeps_hidden: bool = False,
    ) -> StepShape:
        """Set the inputs to a step's; `sampling` has an entry for each chunk that samples."""
        tokens: list[int] = []
        positions: list[int] = []
        contexts: list[int] = []
        ends: list[int] = []
        rows: list[int] = []
        draw_positions: list[int] = []
        tables, at, width = self._tables, 0, self._width
        for _, start, token_ids, block_table, samples in step.chunks:
            num_tokens = len(token_ids)
            if num_tokens == 1:  # nearly all chunks are
                tokens.append(token_ids[0])
                positions.append(start)
            else:
                tokens += token_ids
                positions += range(start, start + num_tokens)
            contexts.append(start)
            ends.append(len(tokens))
            tables[at : at + len(block_table)] = block_table  # type: ignore[assignment]
            at += width
            if samples:
                rows.append(len(tokens) - 1)
                draw_positions.append(start + num_tokens)
        self.last_end = max(positions) + 1
        self._tokens[: len(tokens)] = tokens
        self._positions[: len(tokens)] = positions
        self._contexts[: len(contexts)] = contexts
        self._starts[1 : len(ends) + 1] = ends
        self._rows[: len(rows)] = rows
        self._draw_positions[: len(rows)] = draw_positions
        self._write_sampling(list(sampling))
        return StepShape(
            num_tokens=len(tokens),
            num_seqs=len(contexts),
            num_rows=len(rows),
            draws_all=len(rows) == len(tokens),
            keeps_logits=keeps_logits,
            keeps_hidden=keeps_hidden,
        )

    def _write_sampling(self, sampling: list[RowSampling]) -> None:
        """Mostly those of the step before, at no cost."""
        if sampling and sampling != self._written:
            for target, column in zip(self._sampling, zip(*sampling, strict=True), strict=True):
                target[: len(column)] = column
            self._written = sampling
