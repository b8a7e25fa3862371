"""One batch as plain data: what the scheduler decided, and all that a runner needs to compute
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence, computed in one step. A tuple, since one is made for each
    sequence and step.
    """

    seq_id: int
    start: int
    """Position of the first token; everything before it is already in the blocks."""
    token_ids: Sequence[int]
    block_table: Sequence[int]
    """Blocks of positions 0, block_size, ...; a view, valid until the step is committed."""
    samples: bool
    """The chunk ends at the last known token: the logits of its last row give the next one."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """A sequence that began, or began again after a preemption."""

    seq_id: int
    num_tokens: int
    num_cached_tokens: int
    """Of them, how many came from the prefix cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Chunks in a fixed order, and what changed to make them possible."""

    chunks: tuple[Chunk, ...]
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)
