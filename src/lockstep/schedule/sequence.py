"""One token sequence as the scheduler sees it: its length, how far it is computed, its blocks."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from lockstep.schedule.prefix_cache import Node


@dataclass(frozen=True, kw_only=True)
class SequenceSpec:
    """What a caller asks the scheduler to run."""

    seq_id: int
    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    """0 computes the prompt and samples nothing."""
    priority: int = 0
    """Lower is more urgent; equal priorities go by arrival."""
    leader: int | None = None
    """A sequence with the same prompt: wait until its prompt is computed, then share its blocks."""
    namespace: Hashable = None
    """Sequences share blocks within a namespace only (an adapter, a salt)."""
    max_cached_tokens: int | None = None
    """Take at most this many tokens from the prefix cache: the prompt's others must be computed,
    since something is wanted of them (prompt logprobs). None takes all there are.
    """

    @property
    def max_computed_tokens(self) -> int:
        """Positions that can ever be computed: the last sampled token is never fed back."""
        return len(self.prompt_token_ids) + max(self.max_new_tokens - 1, 0)


@dataclass(eq=False, slots=True)
class ScheduledSequence:
    """A sequence's mutable state; owned and changed by the scheduler alone."""

    spec: SequenceSpec
    arrival: int
    tokens: list[int]
    """Prompt and everything sampled so far."""
    num_computed: int = 0
    """Positions whose keys and values are in `blocks`."""
    blocks: array[int] = field(default_factory=lambda: array("i"))
    """32-bit integers, as a runner copies them into its tables at every step."""
    cached_path: Node | None = None
    """The prefix cache's node for the last published block; None before admission."""
    num_published: int = 0
    """Blocks of this sequence that are in the prefix cache."""
    is_prompt_done: bool = False
    """The whole prompt was computed once; stays true after a preemption."""

    @property
    def seq_id(self) -> int:
        return self.spec.seq_id

    @property
    def urgency(self) -> tuple[int, int]:
        """Sorts the most urgent first."""
        return (self.spec.priority, self.arrival)

    @property
    def is_running(self) -> bool:
        """It holds blocks; otherwise it waits."""
        return bool(self.blocks)

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Only the token sampled last remains to be computed."""
        return self.is_prompt_done and len(self.tokens) - self.num_computed == 1

    @property
    def num_shareable(self) -> int:
        """Tokens the prefix cache may supply; never the last one, whose logits are needed."""
        limit = None if self.is_prompt_done else self.spec.max_cached_tokens
        return len(self.tokens) - 1 if limit is None else min(len(self.tokens) - 1, limit)
