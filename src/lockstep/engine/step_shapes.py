"""Which steps one captured program computes.

The list of kernel calls of a step is the same for every number of tokens, sequences and drawn rows,
but for two turns: whether every token is drawn from, as in decoding, and in how many groups the
rows are drawn. Memory is laid out for the most tokens of a family, so these are graded.
"""

from __future__ import annotations

from typing import NamedTuple

from lockstep.engine.step_inputs import StepLimits, StepShape

LOGITS_ROWS = 64
"""Rows of logits that exist at one time, unless kept: 64 x 150,000 x 4 bytes is 38 MB."""
_FEWEST_TOKENS, _GRADE = 64, 8


class StepFamily(NamedTuple):
    """Shapes that differ in their sizes only, from those of `smallest` to those of `largest`."""

    smallest: StepShape
    largest: StepShape

    @classmethod
    def of(cls, shape: StepShape, limits: StepLimits) -> StepFamily:
        groups = num_groups(shape)
        fewest = (groups - 1) * LOGITS_ROWS + 1 if groups else 0
        most = min(groups * LOGITS_ROWS, limits.max_seqs)
        if shape.draws_all:
            return cls(shape.with_sizes(fewest), shape.with_sizes(most))
        tokens = _FEWEST_TOKENS
        while tokens < shape.num_tokens:
            tokens *= _GRADE
        tokens = min(tokens, limits.max_tokens)
        seqs, one = min(tokens, limits.max_seqs), max(1, fewest)
        return cls(shape.with_sizes(one, one, fewest), shape.with_sizes(tokens, seqs, most))


def num_groups(shape: StepShape) -> int:
    """Groups of at most LOGITS_ROWS in which the rows are drawn."""
    return -(-shape.num_rows // LOGITS_ROWS)
